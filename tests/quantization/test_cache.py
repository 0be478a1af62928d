"""The cache: the same bits back for the same weights and data, and never for others."""

import functools
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import optimize
from optimize.quantization import cache
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import watch
from tests.quantization.test_calibrate import plain


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3)).eval()


def capture(module: nn.Module) -> optimize.Program:
    return optimize.capture(module, (torch.randn(2, 3, 8, 8),))


@functools.cache
def captured() -> optimize.Program:
    """Return ``net`` captured, for passes and watching, which leave it as it is."""
    return capture(net())


DATA = torch.randn(300, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def key(program: optimize.Program, *batches: torch.Tensor) -> str:
    return cache.fingerprint(program, FlatBatches(program, batches))


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    program = captured()
    observations = watch(program, FlatBatches(program, [1e30 * DATA[:50], 1e-30 * DATA[:9]]))
    cache.save(tmp_path / "new" / "folder", "key", observations)
    found = cache.load(tmp_path / "new" / "folder", "key")
    assert plain(found) == plain(observations) and found.samples == 59
    assert found.values["flatten"] is found.values["conv2d_1"], "values in another shape share their statistics still"


def test_the_key_is_that_of_graph_weights_and_data() -> None:
    program, module = capture(net()), net()
    known = key(program, DATA)
    assert key(capture(net()), *DATA.split(7)) == known, "batches make no difference"
    with torch.no_grad():
        module[2].bias[0] += 1e-6
    other_data = DATA.clone()
    other_data[299, 2, 7, 7] += 1e-6
    other_graph = nn.Sequential(*net()[:4], nn.ReLU(), net()[4])
    keys = {known, key(capture(module), DATA), key(program, other_data), key(program, DATA[:299])}
    assert len(keys | {key(capture(other_graph), DATA), key(program, DATA.flip(0))}) == 6


def test_a_buffer_that_is_not_saved_counts_too() -> None:
    class Shifted(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.register_buffer("shift", torch.full((3,), shift), persistent=False)
            self.layer = nn.Linear(3, 3)
            nn.init.ones_(self.layer.weight)
            nn.init.ones_(self.layer.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + self.shift)

    one, two = (optimize.capture(Shifted(shift).eval(), (torch.ones(2, 3),)) for shift in (1.0, 2.0))
    assert one.text() == two.text()
    assert key(one, torch.ones(4, 3)) != key(two, torch.ones(4, 3))


class Passes:
    """Counts the samples that go through the layers of programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samples = 0
        run_node = fx.Interpreter.run_node

        def counted(interpreter: fx.Interpreter, node: fx.Node) -> object:
            result = run_node(interpreter, node)
            if node.op == "placeholder" and type(result) is torch.Tensor:  # capture runs on other kinds
                self.samples += len(result)
            return result

        monkeypatch.setattr(fx.Interpreter, "run_node", counted)


def quantize(folder: Path, data: torch.Tensor, program: optimize.Program | None = None, **options: object) -> tuple:
    step = optimize.QuantizeStatic(calibration=[data], cache=str(folder), **options)
    quantized, outcome = step.apply(program or captured())
    return quantized, any("read from the cache" in note for note in outcome.notes)


def weights(program: optimize.Program) -> list[torch.Tensor]:
    return list(program.graph_module.state_dict().values())


def test_the_same_data_gives_the_same_table_without_running_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, known = quantize(tmp_path, DATA, calibrator="mse", spare=0)
    assert not known and len(list(tmp_path.iterdir())) == 1
    passes = Passes(monkeypatch)
    second, known = quantize(tmp_path, DATA, calibrator="mse", spare=0)
    assert known and 0 < passes.samples <= 64
    assert first.quantization == second.quantization
    assert all(map(torch.equal, weights(first), weights(second)))
    passes.samples = 0
    third, known = quantize(tmp_path, DATA, calibrator="minmax", rounding="nearest", bits=4, spare=0)
    assert known and passes.samples <= 64, "statistics serve every rule"
    assert third.quantization.ranges != first.quantization.ranges


def test_auto_reads_a_few_samples_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = quantize(tmp_path, DATA, spare=0)
    passes = Passes(monkeypatch)
    second, known = quantize(tmp_path, DATA, spare=0)
    assert known and passes.samples <= 64 + 64 + 16
    assert first.quantization == second.quantization


def test_changed_weights_and_changed_data_are_watched_anew(tmp_path: Path) -> None:
    quantize(tmp_path, DATA)
    module = net()
    with torch.no_grad():
        module[0].weight *= 2
    other, known = quantize(tmp_path, DATA, capture(module))
    assert not known
    before = quantize(tmp_path, DATA)[0].quantization.ranges["relu"]
    assert other.quantization.ranges["relu"].high > 1.5 * before.high
    assert not quantize(tmp_path, DATA * 2)[1]
    assert quantize(tmp_path, DATA)[1]


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [_cut, _flipped, lambda _: b"", lambda _: b"PK\x03\x04 nonsense", lambda _: b"x" * 999]
)
def test_a_damaged_file_is_not_used(tmp_path: Path, damage: object) -> None:
    first, _ = quantize(tmp_path, DATA)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    second, known = quantize(tmp_path, DATA)
    assert not known
    assert second.quantization == first.quantization
    assert quantize(tmp_path, DATA)[1], "it was written anew"


def test_data_that_ranges_settle_on_is_not_kept(tmp_path: Path) -> None:
    repeated = DATA[:32].repeat(20, 1, 1, 1)
    program, known = quantize(tmp_path, repeated, until_settled=True)
    assert not known and not list(tmp_path.iterdir())
    assert program.quantization.calibration.samples < len(repeated)
