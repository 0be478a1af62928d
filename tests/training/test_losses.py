"""Losses against what their papers write down."""

import math

import pytest
import torch
from torch.nn import functional

from optimize.errors import UsageError
from optimize.training import Attention, Features, Labels, Lesson, Logits, Similarity


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_labels_are_cross_entropy() -> None:
    logits, labels = torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0])
    torch.testing.assert_close(Labels(2.0)(Lesson(logits, labels)), torch.tensor(2.0 * -math.log(0.75)))
    smooth = Labels(smoothing=0.5)(Lesson(logits, labels))
    torch.testing.assert_close(smooth, torch.tensor(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2, 2)])
def test_logits_are_the_divergence_of_softened_distributions(temperature: float, shape: tuple[int, ...]) -> None:
    student, teacher = torch.randn(shape), torch.randn(shape)
    p, q = (functional.softmax(logits / temperature, 1) for logits in (teacher, student))
    wanted = temperature**2 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(Logits(0.5, temperature)(Lesson(student, None, teacher)), 0.5 * wanted)


def test_gradients_of_logits_keep_their_size_whatever_the_temperature() -> None:
    found = []
    for temperature in (50.0, 100.0):  # far up, T^2 KL is half the squared difference of centred logits, over classes
        student, teacher = torch.zeros(1, 4, requires_grad=True), torch.tensor([[1.0, -1.0, 0.5, -0.5]])
        Logits(temperature=temperature)(Lesson(student, None, teacher)).backward()
        found.append(student.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=1e-3)
    torch.testing.assert_close(found[1], -teacher / 4, rtol=0.05, atol=1e-3)


def test_a_teacher_of_itself_has_nothing_to_teach() -> None:
    inner = {"a": torch.randn(4, 3, 5, 5)}
    lesson = Lesson(torch.randn(4, 3), None, None, inner, inner)
    for loss in (Features({"a": "a"}), Attention({"a": "a"}), Similarity({"a": "a"})):
        torch.testing.assert_close(loss(lesson), torch.tensor(0.0), rtol=0, atol=1e-10)
    alike = Lesson(lesson.outputs, None, lesson.outputs)
    torch.testing.assert_close(Logits()(alike), torch.tensor(0.0), rtol=0, atol=1e-5)


def test_features_are_relative() -> None:
    wanted, value = torch.full((2, 3), 2.0), torch.full((2, 3), 1.0)
    assert float(Features({"a": "b"})(Lesson(value, None, None, {"a": value}, {"b": wanted}))) == pytest.approx(0.25)
    with pytest.raises(UsageError, match=r"'a' and the teacher's 'b' have shapes \[2, 3\] and \[2, 4\]") as caught:
        Features({"a": "b"})(Lesson(value, None, None, {"a": value}, {"b": torch.ones(2, 4)}))
    assert "Similarity" in caught.value.hint


@pytest.mark.parametrize("kind", [Attention, Similarity])
def test_widths_may_differ_and_scale_says_nothing(kind: type) -> None:
    value = torch.randn(4, 6, 3, 3)
    half = Lesson(torch.zeros(1), None, None, {"a": 7.0 * value}, {"b": torch.cat([value, value], 1)})
    torch.testing.assert_close(kind({"a": "b"})(half), torch.tensor(0.0), rtol=0, atol=1e-10)
    other = Lesson(torch.zeros(1), None, None, {"a": value}, {"b": torch.randn(4, 2, 3, 3)})
    assert float(kind({"a": "b"})(other)) > 1e-3


def test_what_is_missing_is_named() -> None:
    lesson = Lesson(torch.randn(2, 3))
    with pytest.raises(UsageError, match="no labels"):
        Labels()(lesson)
    with pytest.raises(UsageError, match="none was given"):
        Logits()(lesson)
