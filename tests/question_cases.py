"""Questions in lm-eval's own fields and in ours, small models to ask, and lm-eval's tasks over files."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model_cases import small_config, wake
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.train.fresh import byte_model

TEXT = "the cat sat on a mat and it was not — naïve café 42 how do you clean, wash or paint a wooden door"
WORDS = TEXT.split()
TASKS = Path(lm_eval.__file__).parent / "tasks"
SOURCES = {
    "piqa": TASKS / "piqa" / "piqa.yaml",
    "arc_easy": TASKS / "arc" / "arc_easy.yaml",
    "arc_challenge": TASKS / "arc" / "arc_challenge.yaml",
    "boolq": TASKS / "super_glue" / "boolq" / "default.yaml",
    "winogrande": TASKS / "winogrande" / "default.yaml",
    "lambada_openai": TASKS / "lambada" / "lambada_openai.yaml",
    "openbookqa": TASKS / "openbookqa" / "openbookqa.yaml",
}
"""The tasks as lm-eval defines them: prompts, choices, targets and metrics are its own."""
TESTED = ("arc_easy", "arc_challenge", "lambada_openai", "openbookqa")
"""Those that lm-eval asks from a test split; the others are asked from validation."""
FILES = {"openbookqa": "openbook_qa"}


def _words(count: int) -> str:
    return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,)))


def write_questions(folder: Path, items: int = 9) -> None:
    """Write every task twice from one set of items: FOLDER/local has our fields, FOLDER/theirs has lm-eval's."""
    torch.manual_seed(1)
    for name in SOURCES:
        pairs = [_item(name, number) for number in range(items)]
        for kind, place in ((0, "local"), (1, "theirs")):
            path = folder / place / f"{FILES.get(name, name) if place == 'local' else name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(pair[kind], ensure_ascii=False) for pair in pairs]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _item(name: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    question, gold = _words(4 + number % 5), number % 2
    if name == "piqa":
        question += " " * (number % 2)  # spaces at the end do occur
        two = [_words(2 + number % 3), _words(4)]
        ours = {"query": f"Question: {question}\n", "choices": two, "gold": gold}
        return ours, {"goal": question, "sol1": two[0], "sol2": two[1], "label": gold}
    if name == "boolq":
        passage = _words(12)
        ours = {"query": f"Passage: {passage}\nQuestion: {question}?", "choices": ["no", "yes"], "gold": gold}
        return ours, {"passage": passage, "question": question, "label": gold}
    if name == "winogrande":
        start, end, options = _words(5), f"{_words(3)}.", ["Ann", "Robert"]
        ours = {"context_options": [f"{start} {o}" for o in options], "continuation": end, "gold": gold}
        sentence = f"{start} _ {end}"
        return ours, {"sentence": sentence, "option1": "Ann", "option2": "Robert", "answer": str(gold + 1)}
    if name == "lambada_openai":
        end = WORDS[number]
        return {"context": question, "continuation": end}, {"text": f"{question} {end}"}
    four = [_words(1 + (number + i) % 3) for i in range(3 + number % 2)]
    theirs = {"choices": {"text": four, "label": list("ABCD")[: len(four)]}, "answerKey": "ABCD"[gold]}
    if name == "openbookqa":
        return {"query": question, "choices": four, "gold": gold}, {**theirs, "question_stem": question}
    return {"query": f"Question: {question}", "choices": four, "gold": gold}, {**theirs, "question": question}


def in_their_fields(name: str, item: dict[str, Any]) -> dict[str, Any]:
    """Take an item of a real file apart into the fields that lm-eval's task is made from."""
    gold = item.get("gold", 0)
    if name == "lambada_openai":
        return {"text": f"{item['context']} {item['continuation']}"}
    if name == "winogrande":
        one, two = item["context_options"]
        same = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        start = one[:same].rfind(" ") + 1
        sentence = f"{one[:start]}_ {item['continuation']}"
        return {"sentence": sentence, "option1": one[start:], "option2": two[start:], "answer": str(gold + 1)}
    query, choices = item["query"].removeprefix("Question: "), item["choices"]
    if name == "piqa":
        return {"goal": query[:-1], "sol1": choices[0], "sol2": choices[1], "label": gold}
    if name == "boolq":
        passage, question = query.rsplit("\nQuestion: ", 1)
        return {"passage": passage.removeprefix("Passage: "), "question": question[:-1], "label": gold}
    labels = list("ABCDE")[: len(choices)]
    field = "question_stem" if name == "openbookqa" else "question"
    return {field: query, "choices": {"text": choices, "label": labels}, "answerKey": labels[gold]}


def write_tasks(folder: Path, data: Path, cache: Path) -> Path:
    """Write lm-eval's tasks over the files of `data`, their only change; returns the folder for include_path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        split = "test" if name in TESTED else "validation"
        config = {
            "include": str(source),
            "task": f"file_{name}",
            "tag": "files",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(data / f"{name}.jsonl")}, "cache_dir": str(cache)},
            "training_split": None,
            "num_fewshot": 0,
            **({"validation_split": None} if split == "test" else {}),
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def ask(model: Any, names: list[str], tasks: Path, **settings: Any) -> dict[str, Any]:
    """Let lm-eval ask a model some of the tasks that `write_tasks` wrote."""
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)
    found = lm_eval.evaluate(lm=model, task_dict=loaded, bootstrap_iters=2, **settings)
    assert found is not None
    return dict(found)


def answers_in(found: dict[str, Any], task: str) -> list[tuple[float, bool]]:
    """What a model made of every choice of a task, in order, from what lm-eval returns."""
    return [tuple(answer[0]) for sample in found["samples"][task] for answer in sample["resps"]]


def word_tokenizer(begins: bool = True) -> PreTrainedTokenizerFast:
    """Train a small BPE, whose tokens join spaces to words; `begins` puts <bos> before every text, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    torch.manual_seed(2)
    tokenizer.train_from_iterator([_words(50) for _ in range(20)], trainer)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def beginning_bytes() -> PreTrainedTokenizerFast:
    """Our byte tokenizer, made to put <bos> first by itself: what lm-eval's own class needs for our models."""
    words = byte_tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", words.bos_token_id)]
    )
    return words


def small_llama(vocab_size: int = 400) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    wake(model)
    return model.double().eval()


def small_titans(architecture: str = "mac") -> Any:
    torch.manual_seed(4)
    model = byte_model(small_config(architecture))
    wake(model)
    return model.double().eval()
