"""The compiler is told what torch's own decorators tell it, and is not imported for that."""

import subprocess
import sys

import torch
import torch._dynamo.testing

from nanosprint.ops.tracing import constant_in_graphs, not_traced


def test_a_constant_is_marked_as_torch_marks_it():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant_in_graphs(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_a_graph_ends_before_what_is_not_traced():
    seen = []

    @not_traced
    def inside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: inside(2 * x) * 3, backend=graphs)
    assert compiled(torch.ones(2)).tolist() == [9.0, 9.0]
    assert (seen, graphs.frame_count) == ([False], 2)


def test_a_run_that_compiles_nothing_never_imports_the_compiler(tmp_path, tiny_data):
    code = (
        "import sys; from nanosprint import load_recipe, train; recipe = load_recipe('tiny'); "
        f"train(recipe, out={str(tmp_path / 'run')!r}, data={str(tiny_data)!r}, execution={{'device': 'cpu'}}); "
        "print([name for name in ('torch', 'torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['torch']"
