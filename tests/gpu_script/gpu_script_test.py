"""scripts/gpu in a copy of its folders, with programs that stand in for the build, the suite and the runs of the demo.

    gpu_script_test.py SOURCE HOTBUNK

On the double (HOTBUNK_GPU_BACKEND=cuda-fake) the benchmarks are played by the built program itself. As if on a GPU, all of
it is played by a stand-in whose figures are known. Held: the rows of the table, its arithmetic, the exit status, and
which claims of hardware_evidence.json are written.
"""
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

SOURCE, HOTBUNK = sys.argv[1], sys.argv[2]

# hotbunk run … --out DIR and hotbunk calibrate … --out FILE, with figures as they come back from a GPU.
STAND_IN = """#!{python}
import json, os, sys
args = sys.argv[1:]
if args == ["doctor"]:
    print("ok   cuDNN                  9.19.0: attention's backward, where it is asked for" if os.environ.get("DNN") else "")
    sys.exit(0)
out = args[args.index("--out") + 1]
shape = os.path.basename(args[1])[:2]  # not of the folder's name, which mktemp draws
backend = args[args.index("--backend") + 1] if "--backend" in args else "cpu"
if backend == "cuda-fake" and os.path.basename(args[1]) != "demo.yaml":
    os.execv({hotbunk!r}, [{hotbunk!r}] + args)
if args[0] == "calibrate":
    with open(out, "w") as f:
        f.write("ops:\\n  - {{op: h2d, dtype: fp32, bytes: 1000000000, seconds: 0.03125}}\\n")
    print(json.dumps({{"measurements": 7, "mean_error": 0.04}}))
    sys.exit(0)
os.makedirs(out)
with open(out + "/summary.json", "w") as f:  # state on the host has another kind of op in the same kind of body
    ops = ["adamw fp32", "cast fp32/bf16"] if "train.offload=layerwise" in args else ["adamw fp32"]
    ops = ["linear bf16 of " + shape] if shape in ("1b", "8b") else ops
    bodies = [{{"body": "train.adamw", "ops": ops}}, {{"body": "a.new.one", "ops": ["zero fp32"]}}]
    products = "cuBLASLt 13.1.0, backward alone" if shape == "8b" else "own kernels"
    choices = [{{"op": "attention_backward", "by": os.environ.get("DNN", "own"), "times": 4}}] if "cudnn" in args else []
    json.dump({{"bodies": bodies, "matrix_products": products, "library_choices": choices}} if backend == "cuda" else {{}},
              f)
other = backend != "cpu" and os.environ.get("OTHER_LENGTHS") == "1"
with open(out + "/lengths.jsonl", "w") as f:
    f.write("[1, 2]\\n" if not other else "[2, 1]\\n")
with open(out + "/metrics.jsonl", "w") as f:
    f.write(json.dumps({{
        "perf/total_num_tokens": 16384.0, "timing_s/update_actor": 2.0, "response_length/mean": 507.0,
        "timing_s/gen": 0.46 if shape == "1b" else 10.0, "timing_s/sleep_optimizer": 0.3, "timing_s/sleep_train": 0.2,
        "timing_s/wake_train": 0.48}}) + "\\n")
sys.exit(3 if shape == "8b" and os.environ.get("FAILS") == "1" else 0)
"""


class Script:
    """One run of the script in a tree of its own."""

    def __init__(self, backend, **environment):
        with tempfile.TemporaryDirectory() as tree:
            for folder in ("scripts", "backends/cuda", "scenarios", "programs", "build/tests/conformance"):
                os.makedirs(os.path.join(tree, folder))
            for file in ("scripts/gpu", "scripts/lib.sh", "scripts/gpu_bench.py", "scenarios/demo.yaml"):
                shutil.copy(os.path.join(SOURCE, file), os.path.join(tree, file))
            os.symlink(os.path.join(SOURCE, "scenarios/catalog"), os.path.join(tree, "scenarios/catalog"))
            # Nothing of what ran before, whatever the tree's own file says.
            self.evidence_file = os.path.join(tree, "backends/cuda/hardware_evidence.json")
            with open(os.path.join(SOURCE, "backends/cuda/hardware_evidence.json")) as f:
                self.before = json.load(f)
            for row in self.before["claims"]:
                row["last_run"] = None
            self.earlier = {"date": "2026-01-02", "machine": "an older GPU", "command": "scripts/gpu", "commit": "abc"}
            self.before["bodies"] = [  # as an earlier run left it
                {"body": "train.adamw", "ops": {"adamw bf16/fp32": self.earlier, "adamw fp32": self.earlier}},
                {"body": "train.zero", "ops": {"zero fp32": self.earlier}}]
            with open(self.evidence_file, "w") as f:
                json.dump(self.before, f)
            with open(os.path.join(tree, "scripts/gpu_torch_step.py"), "w") as f:
                f.write('print(\'{"tokens_per_s": 7000}\')\n')
            program = lambda path, text: self.program(os.path.join(tree, path), text)
            program("programs/cmake", "#!/bin/sh\n")
            program("programs/dpkg-query", "#!/bin/sh\necho install ok installed\n")
            program("programs/nvidia-smi",
                    "#!/bin/sh\n" + ("echo 'NVIDIA H100 80GB HBM3, 580.1'\n" if backend == "cuda" else "exit 9\n"))
            program("build/tests/conformance/conformance_test", "#!/bin/sh\nexit ${CONFORMANCE:-0}\n")
            program("build/hotbunk", STAND_IN.format(python=sys.executable, hotbunk=HOTBUNK))
            kept = {k: v for k, v in os.environ.items() if not k.startswith("HOTBUNK_")}
            done = subprocess.run(
                ["bash", "scripts/gpu"], cwd=tree, capture_output=True, text=True,
                env={**kept, "PATH": os.path.join(tree, "programs") + ":" + kept["PATH"],
                     "HOTBUNK_GPU_BACKEND": backend, **environment})
            self.status, self.said = done.returncode, done.stdout + done.stderr
            with open(self.evidence_file) as f:
                self.evidence = json.load(f)
            self.bodies = {row["body"]: row["ops"] for row in self.evidence["bodies"]}
            self.claims = {row["claim"]: row["last_run"] for row in self.evidence["claims"] if row["last_run"]}

    @staticmethod
    def program(path, text):
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)

    def row(self, begins):
        return next((line for line in self.said.splitlines() if line.startswith(begins)), "no row " + begins)


class GpuScript(unittest.TestCase):
    def test_the_double_plays_every_row_and_leaves_no_evidence(self):
        s = Script("cuda-fake")
        self.assertEqual(s.status, 0, s.said)
        self.assertIn("machine: no GPU (cuda-fake)", s.said)
        for what in ("conformance suite", "the demo, shortened, on CPU ranks", "the demo, ranks as threads on one device",
                     "the same lengths were sampled", "state on the host", "sequences that ranks hold in parts",
                     "the demo, attention's backward by cuDNN"):
            self.assertRegex(s.row(what), r" ok +\d+\.\d s$")
        self.assertIn("no row", s.row("the whole demo learns"))
        for what in ("tiny: training step", "tiny: decode, 4 sequences", "tiny: sleep of training's state",
                     "tiny: wake of training's state", "tiny: P6, simulated beside measured"):
            self.assertRegex(s.row(what), r"\d", what)
        self.assertEqual(s.evidence, s.before)

    def test_a_gpu_s_figures_meet_their_goals_or_not_and_what_went_well_is_evidence(self):
        s = Script("cuda")
        self.assertEqual(s.status, 0, s.said)
        self.assertIn("machine: NVIDIA H100 80GB HBM3, 580.1; ", s.said)
        # 16,384 tokens in 2 s beside torch's 7,000 a second.
        self.assertRegex(s.row("1b: training step"), r"8192 tok/s, torch 7000 +1\.17 \(goal 1\.1: met\)$")
        # 506 steps, each of 1,235,814,400 parameters of 2 B and, for 32 sequences, of 258.5 tokens on average with
        # 2 x 2 B x 16 layers x 8 heads x 64: 1.388 TB in 0.46 s, of 3,350 GB/s.
        self.assertRegex(s.row("1b: decode, 32 sequences"), r"3\.02e\+03 GB/s +0\.90 \(goal 0\.85: met\)$")
        self.assertRegex(s.row("8b: decode, 32 sequences"), r"\(goal 0\.85: not met\)$")
        # 12 B of each parameter in 0.5 s and in 0.48 s, beside 1 GB in 31.25 ms.
        self.assertRegex(s.row("1b: sleep of training's state"), r"29\.7 of 32 GB/s +0\.93 \(goal 0\.95: not met\)$")
        self.assertRegex(s.row("1b: wake of training's state"), r"30\.9 of 32 GB/s +0\.97 \(goal 0\.95: met\)$")
        self.assertRegex(s.row("1b: P6"), r"7 sizes timed +0\.04 \(goal 0\.05: met\)$")
        run = s.claims["conformance suite"]
        self.assertEqual((run["machine"], run["command"]), ("NVIDIA H100 80GB HBM3, 580.1", "scripts/gpu"))
        self.assertRegex(run["date"], r"^\d{4}-\d\d-\d\d$")
        kernels = [row["claim"] for row in s.before["claims"] if row["claim"].startswith("kernels/")]
        self.assertEqual(set(s.claims), {*kernels, "conformance suite", "the demo, ranks as threads on one device",
                                         "the whole demo learns", "state on the host",
                                         "sequences that ranks hold in parts", "matrix products by cuBLASLt",
                                         "benchmarks"})
        self.assertEqual([r["claim"] for r in s.evidence["claims"]], [r["claim"] for r in s.before["claims"]])
        # Bodies that these runs executed, benchmarks among them: each of their ops has this run, others keep theirs; a
        # new kind has a row of its own.
        self.assertEqual([row["body"] for row in s.evidence["bodies"]], ["a.new.one", "train.adamw", "train.zero"])
        self.assertEqual(s.bodies["train.adamw"], {
            "adamw bf16/fp32": s.earlier, "adamw fp32": run, "cast fp32/bf16": run, "linear bf16 of 1b": run,
            "linear bf16 of 8b": run})
        self.assertEqual(s.bodies["train.zero"], {"zero fp32": s.earlier})
        self.assertTrue(run["commit"])

    def test_cudnn_is_asked_where_it_is_and_is_evidence_where_it_took_something(self):
        taken, declined = Script("cuda", DNN="cuDNN"), Script("cuda", DNN="own")
        for s in (taken, declined):
            self.assertEqual(s.status, 0, s.said)
            self.assertRegex(s.row("the demo, attention's backward by cuDNN"), r" ok +\d+\.\d s$")
        self.assertIn("attention's backward by cuDNN", taken.claims)
        self.assertNotIn("attention's backward by cuDNN", declined.claims)
        self.assertIn("no row", Script("cuda").row("the demo, attention's backward"))

    def test_what_fails_is_a_row_an_exit_status_and_no_evidence(self):
        s = Script("cuda", CONFORMANCE="1", OTHER_LENGTHS="1", FAILS="1")
        self.assertEqual(s.status, 1, s.said)
        for what in ("conformance suite", "the same lengths were sampled", "benchmarks"):
            self.assertRegex(s.row(what), r" FAILED *$")
        self.assertRegex(s.row("8b: run"), "FAILED with 3")
        # Of the runs that went well.
        self.assertEqual(set(s.bodies["train.adamw"]),
                         {"adamw bf16/fp32", "adamw fp32", "cast fp32/bf16", "linear bf16 of 1b"})
        self.assertEqual(set(s.claims), {"the demo, ranks as threads on one device", "the whole demo learns",
                                         "state on the host", "sequences that ranks hold in parts"})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
