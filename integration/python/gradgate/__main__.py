"""python -m gradgate env | report | doctor | calibrate."""

import argparse
import sys

from ._native import Error


def _env(_) -> None:
    from . import env

    print(env.text())


def _report(arguments) -> None:
    from . import report

    count = report.write(arguments.log, arguments.output)
    print(f"{arguments.output}: {count} records")


def _doctor(arguments) -> None:
    from .torch import doctor

    doctor.main(arguments)


def _calibrate(arguments) -> None:
    from .torch import _profile

    _profile.main(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gradgate", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("env", help="facts for a bug report")
    command.set_defaults(run=_env)
    command = commands.add_parser("report", help="a decision log as an HTML page")
    command.add_argument("log", help="JSON lines, from GateState(log=…)")
    command.add_argument("-o", "--output", default="report.html")
    command.set_defaults(run=_report)
    command = commands.add_parser("doctor", help="advice for this process group; run it under torchrun")
    command.add_argument("--params", required=True, help="trainable parameters, e.g. 350M")
    command.add_argument("--step", required=True, help="time of a step without communication, e.g. 420ms")
    command.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of the gradients")
    command.add_argument("--codecs", default="bf16,int8", help="candidates, separated by commas")
    command.set_defaults(run=_doctor)
    command = commands.add_parser("calibrate", help="measures this process group's link; run it under torchrun")
    command.add_argument("-o", "--output", required=True, help="the profile, for GateState(profile=…)")
    command.set_defaults(run=_calibrate)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except Error as error:
        print(f"gradgate: {error}" if not str(error).startswith("gradgate") else error, file=sys.stderr)
        return 1
    except ImportError as error:
        if error.name != "torch":
            raise
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
