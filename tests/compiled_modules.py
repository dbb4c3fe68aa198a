"""torch.compile and torch.export of everything that holds a memory: values and gradients of the uncompiled module.

Run by test_compiled.py in a process without the checks of conftest.py, which torch.compile cannot trace through.
The backend aot_eager traces forward and backward as inductor does and runs them as they are.
"""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from hf.hf_cases import GREEDY, prompt, small_model
from model_cases import small_backbone
from titans_lm import MemoryConfig, NeuralMemory
from titans_lm.backbone import frozen_memory
from titans_lm.memory_rule import PolynomialKeys
from titans_lm.ops.polynomial import polynomial
from titans_lm.ops.run import memory_operator

# torch looks at the gradients of what is no leaf while it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def layer(**settings: Any) -> NeuralMemory:
    return NeuralMemory(MemoryConfig(hidden_size=16, num_attention_heads=2, chunk_size=4, **settings)).double()


@pytest.mark.parametrize("settings", [{}, {"memory_depth": 1, "memory_backend": "triton"}], ids=str)
def test_a_layer_is_one_graph_in_a_first_call_in_later_ones_and_token_by_token(settings: dict[str, Any]) -> None:
    memory = layer(**settings)
    compiled = torch.compile(memory, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 18, 16, dtype=torch.float64)
    found = []
    for module in (memory, compiled):
        y, state = module(x[:, :11])
        z, _ = module(x[:, 11:], state)
        found.append(([y, z], gradients(memory, (y * y).sum() + z.sum())))
    assert_same(*found)
    with torch.no_grad():
        _, state = compiled(x[:, :17])
        assert_same(compiled(x[:, 17:], state)[0], memory(x)[0][:, 17:])


@pytest.mark.filterwarnings("ignore:.* should not be instantiated")  # torch's own, while it traces a function
def test_polynomial_keys_are_one_graph() -> None:
    keys, found = PolynomialKeys(MemoryConfig(hidden_size=6, num_attention_heads=2, memory_depth=1, key_degree=2)), []
    x = torch.randn(2, 5, 2, 3, requires_grad=True)

    def make(x: Tensor) -> Tensor:
        return polynomial(x, keys())

    for function in (make, torch.compile(make, backend="aot_eager", fullgraph=True)):
        y = function(x)
        found.append((y, torch.autograd.grad(y.sin().sum(), (x, keys.log_shares))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("architecture", ["mac", "mag, shared", "segment"])
def test_a_stack_is_one_graph(architecture: str) -> None:
    stack = small_backbone(architecture, num_hidden_layers=1)
    x, found = torch.randn(2, 13, stack.config.hidden_size, dtype=stack.norm.weight.dtype), []
    for module in (stack, torch.compile(stack, backend="aot_eager", fullgraph=True)):
        y, state = module(x)
        found.append((y, state, gradients(stack, y.square().sum())))
    assert_same(*found)


@pytest.mark.parametrize("architecture", ["mac", "mal"])
def test_a_stack_can_be_exported(architecture: str) -> None:
    stack = small_backbone(architecture, num_hidden_layers=1)
    x = torch.randn(2, 13, stack.config.hidden_size, dtype=stack.norm.weight.dtype)

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x)[0]

    exported = torch.export.export(Outputs(), (x,)).module()
    assert_same(exported(x + 1.0), stack(x + 1.0)[0])


def test_a_language_model_trains_pads_and_writes_the_same() -> None:
    model = small_model("mac", torch.float64, num_hidden_layers=1)
    ids, mask = prompt(15, 2), torch.ones(2, 15, dtype=torch.long)
    mask[0, :4] = 0
    compiled = torch.compile(model, backend="aot_eager")
    found = []
    for module in (model, compiled):
        out = module(ids, attention_mask=mask, labels=ids)
        found.append((out.logits, gradients(model, out.loss)))
    assert_same(*found)
    assert torch.equal(*(module.generate(ids, max_new_tokens=4, **GREEDY) for module in (model, compiled)))


def test_a_memory_that_is_frozen_later_is_frozen_in_the_graph_too() -> None:
    stack = small_backbone("lmm", num_hidden_layers=1)
    x = torch.randn(1, 9, stack.config.hidden_size, dtype=stack.norm.weight.dtype)
    compiled = torch.compile(stack, backend="eager")
    assert_same(compiled(x)[0], stack(x)[0])
    with frozen_memory(stack):
        expected = stack(x)[0]
        assert_same(compiled(x)[0], expected)
    assert not torch.allclose(compiled(x)[0], expected)


def test_the_operator_is_what_torch_expects_of_one() -> None:
    memory, seen = layer(), []
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    state = memory.init_state(1)
    _, state = memory(x[:, :3], state)

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            return Operators(graph, seen).run(*inputs)

        return run

    torch.compile(memory, backend=keep, fullgraph=True)(x[:, 3:], state)
    assert len(seen) == 1
    torch.library.opcheck(memory_operator, seen[0])


class Operators(torch.fx.Interpreter):
    """Runs a graph and keeps what our operator is given."""

    def __init__(self, graph: torch.fx.GraphModule, seen: list[Any]) -> None:
        super().__init__(graph)
        self.seen = seen

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "neural_memory" in str(target):
            self.seen.append(torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), args))
        return super().call_function(target, args, kwargs)


@pytest.mark.filterwarnings("default")  # torch warns of its own code while it compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@inductor_config.patch("cpp.simdlen", 1)  # which instructions there are takes many seconds to find out
def test_inductor_gives_the_same_values_and_gradients() -> None:
    memory, found = layer(memory_depth=1, decay=False), []
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    for module in (memory, torch.compile(memory)):
        y, _ = module(x)
        found.append((y, gradients(memory, y.square().sum())))
    assert_same(*found)
