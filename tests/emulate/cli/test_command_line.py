"""The command line: what it takes, what it hands on, what it says of a wrong use."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import emulate.devices
import emulate.verify
from emulate.cli import main
from emulate.cli.app import app
from emulate.errors import Unavailable
from emulate.program import Program
from emulate.topology import Topology
from emulate.verify.verdict import Reference, Run, Verdict

COMMANDS = ("verify", "run", "compare", "devices", "causes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n")
    (tmp_path / "link.py").symlink_to("train.py")
    (tmp_path / "notes.md").write_text("mine\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "fit.py").touch()
    return tmp_path


def gpudist(*args):
    return CliRunner().invoke(app, args, prog_name="gpudist")


def verdict_of(*verdicts):
    runs = tuple(Run(f"1x{n + 2}", word) for n, word in enumerate(verdicts))
    return Verdict("train.py", 0, "cpu", {"gpudist": "0"}, Reference("ok", 20), runs)


@pytest.fixture
def verified(folder, monkeypatch):
    """What the library is called with, instead of a verification."""
    calls = []

    def verify(program, **options):
        calls.append((program, options))
        return verified.verdict

    def verified(*args):
        return gpudist("verify", *args), calls[-1] if calls else None

    verified.verdict = verdict_of("equivalent")
    monkeypatch.setattr(emulate.verify, "verify", verify, raising=False)
    return verified


def test_no_arguments_show_the_help():
    shown = gpudist()
    assert shown.exit_code == 2
    assert all(command in shown.output for command in COMMANDS)


def test_every_help_fits_80_columns_and_cuts_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, command in get_command(app).commands.items():
        lines = gpudist(name, "--help").output.splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line.endswith(("-", "...")) or set(line) & set("…│")]  # kill:phase=all-/reduce
        values = [param.metavar for param in command.params if param.metavar]
        assert all(any(value in line for line in lines) for value in values)
        assert all(line in "\n".join(lines) for line in command.epilog.splitlines())
    overview = gpudist("--help").output
    assert max(map(len, overview.splitlines())) <= 80
    assert "This takes\n           about a minute and needs no GPU." in overview


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(command):
    shown = gpudist(command, "--help")
    assert shown.exit_code == 0
    assert "Example" in shown.output
    assert f"gpudist {command}" in shown.output.split("Example")[1]


@pytest.mark.parametrize("command", ["verify", "run"])
def test_the_usage_shows_where_the_programs_arguments_go(command):
    assert f"Usage: gpudist {command} [OPTIONS] [PROGRAM] [-- ARGS...]" in gpudist(command, "--help").output


def test_the_contracts_options_are_offered():
    wide = subprocess.run(
        [sys.executable, "-m", "emulate", "verify", "--help"],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "COLUMNS": "160"},
    ).stdout  # fmt: skip
    offered = (
        "topology",
        "device",
        "seed",
        "steps",
        "timeout",
        "network",
        "all-reduce",
        "precision",
        "allow",
        "reference-arg",
        "json",
        "html",
    )
    assert all(f"--{option}" in wide for option in offered)
    assert "cpu|gpu|auto" in wide


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys\nfrom emulate.cli import main\n"
        "main(['verify', '--help'])\nmain(['verify', 'missing.py'])\nmain(['run', 'missing.py'])\n"
        "heavy = {'tensorflow', 'keras', 'tf_keras', 'numpy', 'cloudpickle', 'psutil'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("heavy: []\n")


def test_the_library_is_called_with_the_defaults_of_the_contract(verified, folder):
    done, (program, options) = verified("train.py")
    assert done.exit_code == 0
    assert program == Program.find("train.py")
    assert {name: value for name, value in options.items() if name != "progress"} == {
        "topology": [Topology(1, 4)], "device": "auto", "seed": 0, "steps": "auto", "strict": False,
        "timeout": 300.0, "network": "own",
        "all_reduce": "auto", "precision": "float32", "allow": (), "reference_args": None, "traces": None,
        "faults": (), "restarts": 3, "virtual": False, "thorough": False, "against": None, "certificate": None,
    }  # fmt: skip


def test_every_option_reaches_the_library(verified, folder):
    _, (program, options) = verified(
        "--topology", "2x2", "train.py", "--topology", "1x3", "--topology", "2x2", "--device", "cpu", "--seed", "7",
        "--steps", "all", "--timeout", "9.5", "--network", "host", "--all-reduce", "ring", "--precision", "float64",
        "--allow", "loss-scaling", "--allow", "loss-scaling", "--reference-arg", "-b", "--reference-arg", "4",
        "--fault", "kill:host=1,step=5", "--restarts", "1", "--traces", "kept", "--strict", "--thorough", "--", "-b", "1",
        "--topology", "--",
    )  # fmt: skip
    assert program.args == ("-b", "1", "--topology", "--")
    assert {name: value for name, value in options.items() if name != "progress"} == {
        "topology": [Topology(2, 2), Topology(1, 3)], "device": "cpu", "seed": 7, "steps": None, "timeout": 9.5,
        "network": "host",
        "all_reduce": "ring", "precision": "float64", "allow": ("loss-scaling", "loss-scaling"), "reference_args": ("-b", "4"),
        "traces": Path("kept"), "faults": ("kill:host=1,step=5",), "restarts": 1, "strict": True,
        "virtual": False, "thorough": True, "against": None, "certificate": None,
    }  # fmt: skip
    assert (folder / "kept").is_dir()


def test_the_second_arm_reaches_the_library_as_it_is_written(verified):
    _, (program, options) = verified("train.py", "--against", "--xla NAME=1", "--", "--epochs", "1")
    assert (program.args, options["against"]) == (("--epochs", "1"), "--xla NAME=1")


@pytest.mark.parametrize(
    "other", [("--virtual",), ("--fault", "kill:host=0,step=1"), ("--allow", "unexplained"), ("--reference-arg", "x")]
)
def test_a_second_arm_stands_without_what_is_about_replicas(folder, other):
    done = gpudist("verify", "train.py", "--against", "--xla", *other)
    assert done.exit_code == 2
    named = " ".join(other) if other[0] == "--allow" else other[0]
    assert f"--against must stand without {named}. Received: --against '--xla'. Leave one of them out." in done.stderr


def test_virtual_replicas_may_be_more_than_a_machine_has_devices(verified):
    done, (_, options) = verified("train.py", "--topology", "128x8", "--topology", "1x1024", "--virtual")
    assert done.exit_code == 0
    assert options["virtual"] is True
    assert [(str(one), one.num_stepping_hosts) for one in options["topology"]] == [("128x8", 1), ("1x1024", 1)]


def test_a_module_is_named_with_its_option(verified):
    _, (program, _) = verified("-m", "package.fit", "--", "x")
    assert (program.kind, program.module, program.args) == ("module", "package.fit", ("x",))


def test_a_function_is_named_behind_a_colon(verified, folder):
    (folder / "train.py").write_text("def main(): ...\n")
    _, (program, _) = verified("train.py:main")
    assert (program.kind, program.function) == ("function", "main")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("equivalent", "equivalent"), 0),
        (("equivalent", "divergent"), 1),
        (("unverified",), 1),
        (("divergent", "failed", "hung"), 3),
        (("divergent", "hung"), 4),
        (("unavailable", "divergent"), 1),
        (("unavailable", "equivalent"), 5),
    ],
)
def test_the_exit_code_is_that_of_the_contract(verified, verdicts, code):
    verified.verdict = verdict_of(*verdicts)
    done, _ = verified("train.py")
    assert done.exit_code == code
    assert "gpudist 0" in done.stdout


def test_the_verdict_is_on_stdout_and_progress_is_not(verified):
    done, _ = verified("train.py")
    assert done.stdout.startswith("train.py\n")
    assert "equivalent" not in done.stderr


def test_a_report_may_go_to_standard_output_and_people_read_the_other(verified, folder):
    done, _ = verified("train.py", "--json", "-")
    assert json.loads(done.stdout)["runs"][0]["verdict"] == "equivalent"
    assert "seed 0, on CPU" in done.stderr
    assert not (folder / "-").exists()


def test_json_is_written(verified, folder):
    verified("train.py", "--json", "v.json")
    assert json.loads((folder / "v.json").read_text())["runs"][0]["verdict"] == "equivalent"


WRONG = [
    ("--seed 1", "A PROGRAM must be given. Received: none. Name one: train.py, -m package.module or train.py:function."),
    (
        "missing.py",
        "A program's file must exist. Received: program='missing.py'. The Python files there are: link.py, train.py.",
    ),
    ("train.py -m package.fit", "One program can be given. Received: -m package.fit and 'train.py'."),
    ("train.py --device tpu", "--device must be one of cpu, gpu, auto. Received: --device 'tpu'. Choose one of them."),
    (
        "train.py --all-reduce x",
        "--all-reduce must be one of auto, ring, hierarchical, one-device. Received: --all-reduce 'x'.",
    ),
    ("train.py --restarts x", "--restarts must be a whole number, 0 or more. Received: --restarts 'x'. Try --restarts 3."),
    ("train.py --restarts 3", "--restarts goes with --fault. Received: --restarts '3' alone. Name a fault"),
    (
        "train.py --json train.py",
        "--json must name a file of its own. Received: --json 'train.py', which is the program itself.",
    ),
    ("train.py --html link.py", "--html must name a file of its own. Received: --html 'link.py', which is the program itself."),
    ("-m package.fit --json package/fit.py", "Received: --json 'package/fit.py', which is the program itself. Name another."),
    ("train.py --certificate notes.md", "Received: --certificate 'notes.md', which has something else. Name another"),
    ("train.py --certificate -", "--certificate must name a file. Received: --certificate '-'. Name one, or leave"),
    ("train.py --json notes.md", "Received: --json 'notes.md', which has something else. Name another, or delete it first."),
    ("train.py --json x --traces ./x", "Received: --json 'x', which is the folder of --traces. Name another."),
    (
        "train.py --json - --html -",
        "--json and --html must be files of their own. Received: '-' for both. Name another for one.",
    ),
    ("train.py --sarif v --json ./v", "--json and --sarif must be files of their own. Received: './v' for both. Name another"),
    ("train.py --json=", "--json must name a file. Received: --json ''. Name one, or leave --json out."),
    ("train.py --topology 0x4", "A topology has 1 to 64 hosts. Received: topology='0x4' with 0 hosts."),
    ("train.py --topology 1x100000", "Received: topology='1x100000' with 100000 devices per host."),
    ("train.py --topology many", "A topology has the form HxD or HxD+Pps. Received: topology='many'."),
    ("train.py --steps 0", "--steps must be a positive whole number, 'all' or 'auto'. Received: --steps '0'. Try --steps 20."),
    ("train.py --steps few", "--steps must be a positive whole number, 'all' or 'auto'. Received: --steps 'few'."),
    ("train.py --timeout 0", "--timeout must be a positive number of seconds. Received: --timeout '0'. Try --timeout 60."),
    (
        "train.py --timeout soon",
        "--timeout must be a positive number of seconds. Received: --timeout 'soon'. Try --timeout 60.",
    ),
    ("train.py --seed -1", "--seed must be a whole number from 0 to 4294967295. Received: --seed '-1'. Try --seed 0."),
    ("train.py --seed x", "--seed must be a whole number from 0 to 4294967295. Received: --seed 'x'. Try --seed 0."),
    ("train.py --allow loss-scalling", "Received: --allow 'loss-scalling'. Did you mean 'loss-scaling'?"),
    ("train.py --allow zzz", "--allow must be the code of a cause. Received: --allow 'zzz'. 'gpudist causes' lists them."),
    ("train.py --json no/v.json", "--json must name a file that can be written. Received: --json 'no/v.json' (No such file"),
    ("train.py --json v --html ./v", "--json and --html must be files of their own. Received: 'v' for both. Name another"),
    ("train.py --html package", "--html must name a file. Received: --html 'package', which is a folder."),
    ("train.py --json package", "--json must name a file. Received: --json 'package', which is a folder."),
    ("train.py --traces package", "--traces must name an empty folder. Received: --traces 'package', which has contents."),
    (
        "train.py --traces train.py",
        "--traces must name a folder that can be written. Received: --traces 'train.py' (File exists).",
    ),
]


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_a_wrong_use_says_what_was_received_before_any_work(verified, args, message):
    done, call = verified(*args.split())
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert call is None
    assert Path("train.py").read_text() == "raise SystemExit('it was run')\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "verify train.py --epochs 2",
            (
                "An option of gpudist verify must exist. Received: --epochs. 'gpudist verify --help' lists them. "
                "Options and arguments of the program itself go after '--'."
            ),
        ),
        (
            "run train.py --toplogy 1x2",
            (
                "An option of gpudist run must exist. Received: --toplogy. Did you mean '--topology'? "
                "Options and arguments of the program itself go after '--'."
            ),
        ),
        (
            "verify train.py other.py",
            (
                "gpudist verify takes one PROGRAM. Received: also 'other.py'. "
                "Options and arguments of the program itself go after '--'."
            ),
        ),
        ("verify train.py --topology", "--topology must have a value. Received: none. Write --topology HxD."),
        ("compare a", "gpudist compare needs TRACE. Received: none. 'gpudist compare --help' shows how it is used."),
        ("devices x", "gpudist devices takes no arguments. Received: 'x'."),
        ("causes nan x", "gpudist causes takes one CODE. Received: also 'x'."),
        ("verfy train.py", "A command of gpudist must exist. Received: 'verfy'. Did you mean 'verify'?"),
        ("version", "A command of gpudist must exist. Received: 'version'. Did you mean '--version'?"),
        ("--nonsense", "An option of gpudist must exist. Received: --nonsense. 'gpudist --help' lists them."),
    ],
)
def test_a_usage_error_of_the_parser_reads_as_any_other(verified, args, message):
    done = gpudist(*args.split())
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"gpudist: {message}\n")


def test_a_shell_completes_options_topologies_and_causes():
    def offered(words, asks="complete_bash"):
        env = {"_GPUDIST_COMPLETE": asks, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return CliRunner().invoke(app, [], prog_name="gpudist", env=env).stdout.split()

    assert "verify" in offered("gpudist ")
    assert "--topology" in offered("gpudist verify --to")
    assert offered("gpudist verify --topology 2x4") == ["2x4"]
    assert offered("gpudist causes loss-s") == ["loss-scaling"]
    assert offered("gpudist verify train.py --allow loss-r") == ["loss-report"]
    assert "_GPUDIST_COMPLETE=complete_bash" in offered("", asks="source_bash")


def test_a_run_refuses_a_second_topology(folder):
    done = gpudist("run", "train.py", "--topology", "1x2", "--topology", "2x1")
    assert done.exit_code == 2
    assert "A run has one topology. Received: --topology 1x2 --topology 2x1. Run each by itself;" in done.stderr


def test_traces_that_are_not_there_are_named(folder):
    (folder / "kept" / "1x4").mkdir(parents=True)
    (folder / "kept" / "1x4" / "trace.json").touch()
    done = gpudist("compare", "kept", "kept/1x4")
    assert done.exit_code == 2
    assert (
        "A TRACE must be the folder of a recorded run, with a trace.json. Received: 'kept'. Traces in it: kept/1x4."
        in done.stderr
    )


def test_two_traces_are_compared_the_first_being_the_reference(folder, monkeypatch):
    for name, seed in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        about = {"program": "train.py", "seed": seed, "versions": {"tensorflow": "2.21.0"}}
        (folder / name / "trace.json").write_text(json.dumps(about))
    calls = []

    def compare_traces(reference, topology, *, allow):
        calls.append((reference.name, topology.name, *allow))
        return Run("1x4", "divergent")

    monkeypatch.setattr(emulate.verify, "compare_traces", compare_traces)
    done = gpudist("compare", "a", "b", "--json", "v.json", "--html", "v.html", "--allow", "identical-dropout")
    assert "train.py" in (folder / "v.html").read_text()
    assert (done.exit_code, calls) == (1, [("a", "b", "identical-dropout")])
    written = json.loads((folder / "v.json").read_text())
    assert (written["program"], written["seed"], written["versions"]) == ("train.py", 2, {"tensorflow": "2.21.0"})
    assert "The two runs had a different seed: 1 in the reference, 2 here." in done.stdout
    wrong = gpudist("compare", "a", "b", "--allow", "identical-dropouts")
    assert wrong.exit_code == 2
    assert "--allow must be the code of a cause. Received: --allow 'identical-dropouts'. Did you mean" in wrong.stderr


@pytest.mark.parametrize("place", ["v.json", "-"])
@pytest.mark.parametrize("wrong", [["missing.py"], ["train.py", "--topology", "1X4"], ["train.py", "--nonsense"]])
def test_a_usage_error_is_written_where_json_says(folder, wrong, place):
    done = gpudist("verify", *wrong, f"--json={place}", "--", "--json", "of_the_program.json")
    written = json.loads(done.stdout if place == "-" else (folder / place).read_text())
    assert done.exit_code == 2
    assert f"gpudist: {written.pop('message')}\n" == done.stderr
    assert written == {"schema": "gpudist.failure/1", "verdict": "usage-error", "exit_code": 2, "runs": []}
    assert not (folder / "of_the_program.json").exists()


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [
        (Unavailable("no GPU"), "unavailable", 5),
        (KeyboardInterrupt(), "interrupted", 130),
        (ZeroDivisionError("ours"), "gpudist-error", 70),
    ],
)
def test_what_ends_a_verification_is_written_where_json_says(folder, monkeypatch, error, verdict, code):
    def verify(*_, **__):
        raise error

    monkeypatch.setattr(emulate.verify, "verify", verify, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (folder / "v.json").write_text(json.dumps(verdict_of("equivalent").to_json()))  # an earlier report does not stay
    assert main(["verify", "train.py", "--json", "v.json"]) == code
    written = json.loads((folder / "v.json").read_text())
    assert (written["verdict"], written["exit_code"]) == (verdict, code)


def test_a_file_that_is_no_report_stays_when_a_command_fails(folder):
    assert gpudist("verify", "missing.py", "--json", "notes.md").exit_code == 2
    assert (folder / "notes.md").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("verdicts", "strict", "overall", "code"),
    [
        (("equivalent", "equivalent"), False, "equivalent", 0),
        (("equivalent", "by-design"), False, "by-design", 0),
        (("equivalent", "by-design"), True, "by-design", 1),
        (("by-design", "divergent"), True, "divergent", 1),
        (("divergent", "hung", "failed"), False, "failed", 3),
        (("unavailable", "unverified"), False, "unverified", 1),
        (("unavailable", "equivalent"), False, "unavailable", 5),
    ],
)
def test_the_overall_verdict_is_the_one_that_decides_the_exit_code(verdicts, strict, overall, code):
    written = replace(verdict_of(*verdicts), strict=strict).to_json()
    assert (written["verdict"], written["exit_code"]) == (overall, code)


def test_causes_are_written_as_json():
    all_of = json.loads(gpudist("causes", "--json", "-").stdout)
    one = json.loads(gpudist("causes", "loss-scaling", "--json", "-").stdout)
    assert one["schema"] == all_of["schema"] == "gpudist.causes/1"
    assert one["causes"] == [cause for cause in all_of["causes"] if cause["code"] == "loss-scaling"]
    assert {"title", "meaning", "wrong", "right", "evidence", "fixes", "links", "url"} <= set(one["causes"][0])


def test_every_cause_is_listed_and_explained():
    listed = gpudist("causes")
    codes = [line.split()[0] for line in listed.stdout.splitlines() if not line.startswith(" ")]
    assert listed.exit_code == 0
    assert "loss-scaling" in codes
    for code in codes:
        shown = gpudist("causes", code)
        assert shown.exit_code == 0
        assert all(f"\n{title}\n" in shown.stdout for title in ("How gpudist recognizes it", "How to fix it"))


def test_causes_are_told_as_json_too():
    every = json.loads(gpudist("causes", "--json", "-").stdout)["causes"]
    (one,) = json.loads(gpudist("causes", "clip-before-reduce", "--json", "-").stdout)["causes"]
    assert one in every
    assert one["code"] == "clip-before-reduce"
    assert {"title", "meaning", "wrong", "right", "evidence", "fixes", "links", "by_design", "advice", "url"} <= one.keys()
    assert "clipnorm" in one["fixes"]


def test_an_unknown_cause_offers_the_near_one():
    done = gpudist("causes", "lossscaling")
    assert done.exit_code == 2
    assert "CODE must be the code of a cause. Received: CODE 'lossscaling'. Did you mean 'loss-scaling'?" in done.stderr


def test_the_machine_is_described_in_words_and_in_json(monkeypatch, tmp_path):
    about = {
        "cpus": 2,
        "memory_bytes": {"total": 8 * 2**30, "available": 3 * 2**29},
        "tensorflow": None,
        "gpus": {
            "driver": "570.1",
            "found": [{"name": "H100", "memory_bytes": {"total": 2**30, "free": 2**29}, "compute_capability": "9.0"}],
            "topologies": {"one_gpu_each": ["1x1"], "slices": {"1x2": "0.2 GiB each"}, "too_large": []},
        },
        "emulation": {"devices_per_host": 256, "hosts": 9},
    }
    isolation = {
        "own_network": {"available": True, "why": None, "ports": "nobody reaches them"},
        "copy_on_write": {"available": False, "why": "the system refuses it"},
    }
    monkeypatch.setattr(emulate.devices, "describe_machine", lambda: about)
    monkeypatch.setattr(emulate.cluster, "describe_isolation", lambda: isolation)
    done = gpudist("devices", "--json", str(tmp_path / "machine.json"))
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "cpus             2",
        "memory           8.0 GiB total, 1.5 GiB available",
        "tensorflow       unknown",
        "gpus",
        "  driver      570.1",
        "  found",
        "    0  name H100, memory 1.0 GiB total, 0.5 GiB free, compute capability 9.0",
        "  topologies",
        "    one gpu each  1x1",
        "    slices",
        "      1x2  0.2 GiB each",
        "    too large     none",
        "emulation",
        "  devices per host  256",
        "  hosts             9",
        "private network  yes",
        "  ports  nobody reaches them",
        "private files    no: the system refuses it",
    ]
    assert json.loads((tmp_path / "machine.json").read_text()) == {"schema": "gpudist.devices/1", **about, **isolation}
    assert gpudist("devices", "--json", str(tmp_path / "machine.json")).exit_code == 0


def test_a_trace_is_not_written_over_by_the_report_on_it(folder):
    (folder / "a").mkdir()
    about = '{"format": "gpudist.trace/1", "program": "train.py"}'
    (folder / "a" / "trace.json").write_text(about)
    done = gpudist("compare", "a", "a", "--json", "a/trace.json")
    assert done.exit_code == 2
    assert "Received: --json 'a/trace.json', which has something else." in done.stderr
    assert (folder / "a" / "trace.json").read_text() == about


def test_main_returns_the_exit_code(folder, capsys):
    assert main(["--version"]) == 0
    assert main(["verify", "missing.py"]) == 2
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().out.startswith("gpudist")
