"""TensorRT's rules as this package states them, against the verdict of TensorRT-RTX's own parser and builder."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from optimize.errors import Refused
from optimize.targets.tensorrt import builder, conformance
from optimize.targets.tensorrt.options import EngineOptions
from tests.targets.tensorrt_graphs import BROKEN, GOOD, SILENT, Case
from tests.targets.tensorrt_orders import order, rtx


def findings_of(case: Case) -> list[conformance.Breach]:
    return conformance.check(ir.from_proto(case.model), case.capabilities)


def build(case: Case, folder: Path) -> builder.Built:
    return builder.build(order(folder, case.model, EngineOptions(compute_capabilities=case.capabilities)))


@rtx
@pytest.mark.parametrize("name", GOOD)
def test_rules_and_parser_agree_on_good_graphs(name: str, tmp_path: Path) -> None:
    assert findings_of(GOOD[name]) == []
    build(GOOD[name], tmp_path)
    assert (tmp_path / "net.engine").read_bytes()[:4] == b"vtrt"


@rtx
@pytest.mark.parametrize("name", BROKEN)
def test_rules_and_parser_agree_on_broken_graphs(name: str, tmp_path: Path) -> None:
    case = BROKEN[name]
    findings = findings_of(case)
    assert all(finding.rule and finding.remedy for finding in findings)
    assert any(case.where in finding.where and not finding.silent for finding in findings)
    with pytest.raises(Refused) as caught:
        build(case, tmp_path)
    assert case.where in caught.value.what
    assert "TensorRT-RTX" in caught.value.what
    assert not (tmp_path / "net.engine").exists()


@rtx
@pytest.mark.parametrize("name", SILENT)
def test_the_rules_name_what_the_parser_changes_without_a_word(name: str, tmp_path: Path) -> None:
    case = SILENT[name]
    findings = findings_of(case)
    assert any(case.where in finding.where for finding in findings)
    assert all(finding.silent for finding in findings)
    assert build(case, tmp_path).warnings == ()


@rtx
@pytest.mark.parametrize("name", SILENT)
def test_what_is_computed_otherwise_without_a_word(name: str) -> None:
    import tensorrt_rtx

    network = parsed(tensorrt_rtx, SILENT[name].model)
    if name == "float64":
        assert network.get_input(0).dtype == tensorrt_rtx.DataType.FLOAT
    if name == "absent zero point":
        stored = [layer.get_output(0).dtype for layer in network if layer.type == tensorrt_rtx.LayerType.QUANTIZE]
        assert stored == [tensorrt_rtx.DataType.INT8]


@rtx
@pytest.mark.parametrize("name", ["scales a channel of an activation", "weight scales along the input channels"])
def test_a_convolution_with_wrong_scales_gets_another_kernel(name: str, tmp_path: Path) -> None:
    build(GOOD["float bias"], tmp_path)
    fused_bytes = (tmp_path / "net.engine").stat().st_size
    build(SILENT[name], tmp_path)
    assert (tmp_path / "net.engine").stat().st_size > 1.3 * fused_bytes


@rtx
def test_the_unsupported_operators_are_those_the_parser_lacks() -> None:
    import tensorrt_rtx

    schemas = [schema for schema in onnx.defs.get_all_schemas() if schema.domain == "" and schema.since_version <= 22]
    parser = tensorrt_rtx.OnnxParser(network_of(tensorrt_rtx), builder.log.listen(tensorrt_rtx))
    lacking = {schema.name for schema in schemas if not schema.deprecated and not parser.supports_operator(schema.name)}
    assert lacking == conformance.UNSUPPORTED


def network_of(module: object) -> object:
    built = module.Builder(builder.log.listen(module))
    return built.create_network(builder.network_flags(module))


def parsed(module: object, model: onnx.ModelProto) -> object:
    network = network_of(module)
    assert module.OnnxParser(network, builder.log.listen(module)).parse(model.SerializeToString())
    return network
