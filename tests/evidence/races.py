"""Runs of races in the process of the test, where the process is not what is tested."""

from pathlib import Path

from nanosprint.results.runs import RunDir
from nanosprint.training.api import carry_out
from nanosprint.training.request import load_request


def process_of(begun):
    """What stands in for `Runner.process`; `begun` gets the folders' names in the order in which they are begun."""

    def process(self, command, log, **_):
        run = RunDir(Path(command[-1]))
        begun.append(run.name)
        try:
            carry_out(load_request(run), run, resume=True)
        except RuntimeError as error:  # the process would end with a code
            raise ValueError(str(error)) from error

    return process
