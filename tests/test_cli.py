"""The command line: names, overrides, one-sentence mistakes, exit codes."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from wide_jax import cli, console


def parse(*argv):
  return cli.parse([*argv, "--workdir=run"])


@pytest.mark.parametrize(
  "spec",
  ["tiny:smoke", "configs/tiny.py:smoke", "{dir}/tiny.py:smoke"],
)
def test_config_by_name_and_path(spec, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # a name needs no checkout around it
  path = cli.resolve_config(spec.format(dir=cli.configs_dir()))
  assert path == f"{cli.configs_dir()}/tiny.py:smoke"
  config, _ = parse("--config", path)
  assert config.routers.steps == 20


def test_a_local_file_goes_before_a_shipped_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "tiny.py").write_text("x = 1\n")
  assert cli.resolve_config("configs/tiny.py") == "configs/tiny.py"


def test_own_config_builds_on_base(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "from wide_jax.configs import base\n"
    "def get_config(arg=''):\n"
    "  c = base.get_config()\n"
    "  c.seed = 5 if arg == 'five' else 4\n"
    "  return c\n"
  )
  assert parse(f"--config={path}:five")[0].seed == 5
  assert parse(f"--config={path}")[0].seed == 4


def test_overrides_of_every_type():
  config, given = cli.parse(
    [
      "--config.routers.lr=1e-4",  # before --config is fine too
      "--config",
      "tiny:smoke",
      "--config.data.train=('a.txt', 'b.txt')",
      "--config.eval.windows=(64, 32)",
      "--config.budget.thresholds=per_kind",
      "--config.budget.attn_target=0.7",
      "--config.budget.ffn_target",
      "0.3",
      "--config.regroup.enabled=false",
      "--config.route.method=token_depth",
      "--workdir",
      "run",
      "--dry-run",
    ]
  )
  assert config.routers.lr == 1e-4
  assert config.data.train == ("a.txt", "b.txt")
  assert config.eval.windows == (64, 32)
  assert (config.budget.attn_target, config.budget.ffn_target) == (0.7, 0.3)
  assert config.regroup.enabled is False
  assert config.route.method == "token_depth"
  assert (given.workdir, given.dry_run, given.data) == ("run", True, "")


@pytest.mark.parametrize(
  "form", ["--config.data.train={}", "--config.data.train|{}"]
)
@pytest.mark.parametrize(
  "path",
  ["my text.txt", "a, b.txt", "/tmp/dir with späces ☃/té xt.txt", "it's"],
)
def test_a_path_with_a_space_or_a_comma_is_one_path(form, path):
  config, _ = parse("--config=tiny", *form.format(path).split("|"))
  assert config.data.train == (path,)


def test_argv_of_the_process_is_left_alone():
  before = list(sys.argv)
  parse("--config=tiny", "--config.seed=3")
  assert sys.argv == before


@pytest.mark.parametrize(
  "argv,message",
  [
    ([], "--config is missing"),
    (["--config"], "--config needs a value"),
    (["--config=tinny"], "Did you mean 'tiny'"),
    (["--config=/no/such.py"], "no such config"),
    (
      ["--config=tiny", "--config.routers.lrr=1"],
      "--config.routers.lrr: no such field; did you mean --config.routers.lr?",
    ),
    (["--config=tiny", "--config.routrs.lr=1"], "--config.routers?"),
    (["--config=tiny", "--config.zzz=1"], "no such field; config has"),
    (["--config=tiny", "--config.routers.lr=fast"], "lr=fast"),
    (["--config=tiny", "--config.routers.steps=2.5"], "steps=2.5"),
    (["--config=tiny", "--config.route.ffn_group=24"], "ffn_group=24"),
    # wrong types inside a list, numbers without end, seeds jax cannot hold
    (["--config=tiny", "--config.eval.windows=abc"], "windows=('abc',)"),
    (["--config=tiny", "--config.eval.windows=(32.5,)"], "windows=(32.5,)"),
    (["--config=tiny", "--config.data.train=(1, 2)"], "train=(1, 2)"),
    (["--config=tiny", "--config.routers.tau=(1, 'a')"], "tau=(1, 'a')"),
    (["--config=tiny", "--config.routers.lr=inf"], "lr=inf"),
    (["--config=tiny", "--config.lora.alpha=nan"], "alpha=nan"),
    (
      ["--config=tiny", "--config.data.seq_len=99999999999999999999"],
      "seq_len",
    ),
    (["--config=tiny", "--config.seed=-1"], "seed=-1"),
    (["--config=tiny", "--config.seed=4294967296"], "seed=4294967296"),
    (["--config=tiny", "--wrokdir=x"], "workdir"),
    (["--config=tiny", "stray"], "stray"),
    (["--config=tiny", "--data=/no/such/dir"], "/no/such/dir"),
    (["--config=tiny:smok"], "tiny.py: variant 'smok'"),
  ],
)
def test_mistakes_are_one_sentence_and_exit_2(argv, message, capsys):
  def main(args):
    cli.parse([*args, "--dry-run"] if args != ["--config"] else args)

  assert cli.run(main, argv) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("error: ")
  assert message in err
  assert err.count("\n") == 1
  assert "Traceback" not in err


def test_workdir_is_needed_unless_nothing_is_written():
  with pytest.raises(ValueError, match="--workdir is missing"):
    cli.parse(["--config=tiny"])
  assert cli.parse(["--config=tiny", "--dry-run"])[1].workdir is None


def test_help(capsys):
  assert cli.run(lambda a: cli.parse(a, about="Trains.") and 0, ["--help"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("Trains.")
  assert "--dry-run" in out
  assert "tiny" in out


def test_exit_codes(capsys):
  def interrupted(_):
    raise KeyboardInterrupt

  def missing(_):
    pathlib.Path("/no/such/file").read_text()

  assert cli.run(lambda _: None, []) == 0
  assert cli.run(lambda _: 3, []) == 3
  assert cli.run(interrupted, []) == 130
  assert cli.run(missing, []) == 2
  assert "error: No such file or directory: /no/such/file" in (
    capsys.readouterr().err
  )


def test_bugs_keep_their_trace():
  def divide(_):
    with np.errstate(divide="raise"):
      np.ones(1) / np.zeros(1)

  with pytest.raises(ZeroDivisionError):
    cli.run(lambda _: 1 // 0, [])
  # ValueError of a library: our code handed it something wrong
  with pytest.raises(ValueError, match="reshape"):
    cli.run(lambda _: np.zeros(3).reshape(2, 2), [])
  with pytest.raises(FloatingPointError):
    cli.run(divide, [])
  with pytest.raises(TypeError):
    cli.run(lambda _: jax.numpy.zeros(3) @ jax.numpy.zeros(4), [])


def test_unsupported_jax_is_named(monkeypatch, capsys):
  monkeypatch.setattr(console.importlib.metadata, "version", lambda _: "0.9.1")
  assert cli.run(lambda _: 0, []) == 2
  assert "jax 0.9.1 is not supported" in capsys.readouterr().err


def test_data_directory(tmp_path):
  config, _ = parse(
    "--config=smollm2_135m",
    f"--data={tmp_path}",
    "--config.data.train=('corpus/a.gz', '/abs/b', 'hf:org/x', 'embedded:x')",
  )
  assert config.data.train == (
    f"{tmp_path}/corpus/a.gz",
    "/abs/b",
    "hf:org/x",
    "embedded:x",
  )
  assert config.data.calibration == (f"{tmp_path}/corpus/valid.jsonl",)
  assert config.eval.text == f"{tmp_path}/eval/wikitext2_raw_test.txt"


def test_further_flags():
  def define(values):
    cli.flags.DEFINE_integer("stop_after", 0, "Steps.", flag_values=values)

  _, given = cli.parse(
    ["--config=tiny", "--dry-run", "--stop-after=7"], define=define
  )
  assert given.stop_after == 7


def test_device_auto_and_cpu_say_what_they_got():
  expect = f"device: {len(jax.devices())} x cpu (cpu)"
  assert cli.select_device("auto") == expect
  assert cli.select_device("cpu") == expect


@pytest.mark.parametrize("device,remedy", [("gpu", "gpu"), ("tpu", "tpu")])
def test_missing_device_is_refused_with_the_remedy(device, remedy):
  """Trial J2: no quiet fall back to the CPU."""
  code = (
    "from wide_jax import cli\n"
    f"raise SystemExit(cli.run(lambda _: cli.select_device({device!r}), []))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    cwd=pathlib.Path(cli.__file__).parent.parent,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert f"device={device!r}" in done.stderr
  assert "finds none" in done.stderr
  assert "--config.device=auto" in done.stderr
  assert "Traceback" not in done.stderr


def test_remedy_depends_on_what_is_wrong(monkeypatch):
  def with_plugin(version):
    def lookup(name):
      if version and name == "jax-cuda13-plugin":
        return version
      raise console.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(console.importlib.metadata, "version", lookup)
    return console.no_device("gpu", "0.11.2")

  assert "pip install 'wide_jax[gpu]'" in with_plugin(None)
  assert "jax-cuda13-plugin 0.10.2 does not belong" in with_plugin("0.10.2")
  assert "nvidia-smi" in with_plugin("0.11.2")
