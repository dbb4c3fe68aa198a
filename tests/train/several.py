"""A run on one process or several, as a script (torchrun --nproc-per-node 2 several.py CASE) or forked."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

from titans_lm.config import BackboneConfig
from titans_lm.data.batches import DocumentLanes, DocumentRows, PackedRows
from titans_lm.data.prepared import TokenFolder
from titans_lm.train.fresh import model_for
from titans_lm.train.loop import fit
from titans_lm.train.losses import CarriedLoss, next_token_loss
from titans_lm.train.parallel import joined_distributed
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings

if __name__ != "__mp_main__":  # a process that makes batches beside a script needs nothing of this
    import torch._dynamo  # an optimizer loads it, and the package the next: a process that is forked has both at once
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama  # noqa: F401 - as above

    import titans_lm.hf  # noqa: F401

SAMPLERS = {"packed": PackedRows, "documents": DocumentRows, "lanes": DocumentLanes}


def make_model(case: dict, tokenizer) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if case["model"] == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, attention_dropout=0.2, tie_word_embeddings=True,
            )
        )  # fmt: skip
    # With heads of 8 channels SiLU shuts all of one now and then; what is left has a direction that rounding decides,
    # and norms of gradients differ by 1e-3 after 14 steps. θ of a memory's later layers is bounded by fan-in for the
    # same reason: large steps blow rounding up, and norms differ by 2e-4 after 18.
    config = BackboneConfig(
        architecture=case["model"], hidden_size=32, num_attention_heads=2, num_hidden_layers=2, memory_expansion=2,
        intermediate_size=32, chunk_size=4, segment_len=8, window=8, num_persistent=2, **case.get("memory", {}),
    )  # fmt: skip
    return model_for(config, tokenizer)


def forked(case: dict, rank: int, processes: int, port: int, log: str) -> None:
    """One of several processes, as torchrun would have started it; what it says goes to a file."""
    from forks import say_into  # where this file is run as a script it is not on the path

    say_into(log)
    if processes > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    run(case)


def run(case: dict) -> None:
    warnings.simplefilter("error")
    folder = TokenFolder(case["data"])
    tokenizer = folder.tokenizer()
    batches = SAMPLERS[case["rows"]](folder.train, seq_len=16, batch_size=4, seed=3)
    settings = FitSettings(**{"warmup_steps": 2, "lr": 1e-2, "eval_every": 0, "save_every": 3, **case["settings"]})
    with joined_distributed(settings.device) as world:
        path = Path(case["run"])
        if world.main and not (path / "settings.json").is_file():
            RunFolder.create(path, {}, tokenizer)
        world.anybody(False)  # wait for it

        def on_step(record: dict) -> None:
            kill = case.get("kill")
            if kill and record["step"] == kill["step"] and world.rank == kill["rank"]:
                os.kill(os.getpid(), signal.SIGKILL)

        loss = CarriedLoss() if case["rows"] == "lanes" else next_token_loss
        fit(make_model(case, tokenizer), batches, loss, settings, run=RunFolder.open(path, tokenizer), on_step=on_step)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
