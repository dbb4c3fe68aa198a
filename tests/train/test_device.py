import pytest
import torch

from titans_lm.train.device import choose_device, environment, mixed_precision, to_device


def test_auto_takes_a_gpu_where_there_is_one():
    assert choose_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu9", "cuda:99", "xla", "", "CPU"])
def test_a_device_that_is_not_there_is_an_error(name):
    with pytest.raises(ValueError, match=rf"got device='{name}'; this machine has \d+ CUDA devices"):
        choose_device(name)


def test_precision_follows_the_device_unless_it_is_named():
    x = torch.ones(2, 2)
    for precision, dtype in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with mixed_precision(precision, torch.device("cpu")):
            assert (x @ x).dtype == dtype
    with pytest.raises(ValueError, match="got precision='fp8'"):
        mixed_precision("fp8", torch.device("cpu"))


def test_a_batch_moves_as_a_whole():
    moved = to_device({"a": torch.ones(2), "b": torch.zeros(1)}, torch.device("meta"))
    assert {name: part.device.type for name, part in moved.items()} == {"a": "meta", "b": "meta"}


def test_the_environment_names_what_ran():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert {"python", "platform", "gpus", "titans-lm", "transformers"} <= found.keys()
