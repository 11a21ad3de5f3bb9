"""Going on with a run: what may differ, where it begins, what its files hold afterwards. No engine."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.errors import InputError
from agent.symptoms import silent
from agent.training import data, resume, run, saving, supervise
from agent.training.display import Display
from agent.training.rundir import STEP_METRICS, RunDir, append_jsonl, read_jsonl, stop_file, write_json, write_jsonl
from agent.training.watchdog import FIRST_LIMITS, Watchdog

SAVED = {"mmqa": {"task": "digits", "seed": 1}, "trainer": {"total_training_steps": 40, "resume_mode": "disable"}}


def changed(**keys):
    wanted = json.loads(json.dumps(SAVED))
    for path, value in keys.items():
        section, key = path.split("__")
        wanted[section][key] = value
    return wanted


def test_differences_are_named_and_own_keys_left_out():
    assert resume.differences(SAVED, SAVED) == []
    assert resume.differences(SAVED, changed(trainer__resume_mode="resume_path")) == []
    assert resume.differences(SAVED, changed(trainer__total_training_steps=80, trainer__new=1)) == [
        "trainer.new: None -> 1",
        "trainer.total_training_steps: 40 -> 80",
    ]


@pytest.mark.parametrize("key", ["mmqa__task", "mmqa__seed"])
def test_what_cannot_change_is_refused(key):
    with pytest.raises(InputError, match=rf"{key.replace('__', '.')}: .* cannot change in a run that goes on"):
        resume.differences(SAVED, changed(**{key: "other"}))


def test_a_finished_run_says_how_to_train_further(tmp_path):
    folder = RunDir(tmp_path)
    assert resume.finished(folder, 40) is None
    write_json(folder.status, {"state": "finished", "step": 40})
    assert "--steps 80" in (resume.finished(folder, 40) or "") and resume.finished(folder, 60) is None
    write_json(folder.status, {"state": "failed", "step": 40})
    assert resume.finished(folder, 40) is None


def test_fewer_steps_than_were_made_are_refused(tmp_path, monkeypatch):
    folder = RunDir(tmp_path)
    folder.config.write_text("a: 1\n")
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=8))
    monkeypatch.setattr(run, "plan_on", lambda *arguments, **options: (config, []))
    monkeypatch.setattr(resume, "choose", lambda *arguments: resume.Start(42, None, ["x"]))
    with pytest.raises(InputError, match="step 42 is made already, so a run of 8 steps has nothing left to do"):
        run.train(run_dir=tmp_path, resume="auto", steps=8)
    assert folder.config.read_text() == "a: 1\n"


@pytest.mark.parametrize(("terminal", "answer", "goes_on"), [(True, "", True), (True, "n", False), (False, "", False)])
def test_on_a_terminal_it_asks_and_elsewhere_it_refuses(tmp_path, monkeypatch, terminal, answer, goes_on):
    write_json(RunDir(tmp_path).status, {"state": "failed", "step": 3})
    asked = []
    monkeypatch.setattr(run.sys.stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(run.sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    # going on, it finds that there is no config.yaml
    said = r"config\.yaml is missing" if goes_on else "already holds a run; go on with --resume auto"
    with pytest.raises(InputError, match=said):
        run.train(run_dir=tmp_path)
    assert len(asked) == terminal


def test_without_a_checkpoint_it_begins_again(tmp_path):
    start = resume.choose(RunDir(tmp_path), None)
    assert (start.step, start.checkpoint) == (0, None) and "begins again at step 1" in start.notes[-1]
    with pytest.raises(InputError, match="no whole checkpoint"):
        resume.choose(RunDir(tmp_path), "20")


def test_metrics_and_samples_keep_one_object_a_step(tmp_path):
    folder = RunDir(tmp_path)
    folder.new_attempt()
    for step in range(6):
        append_jsonl(folder.metrics, {"step": step, "attempt": 1})
        append_jsonl(folder.samples, {"step": step, "attempt": 1, "id": "a"})
        append_jsonl(folder.samples, {"step": step, "attempt": 1, "id": "ü"})
    attempt = folder.new_attempt()
    assert resume.supersede(folder, 3, attempt) == 2
    assert [one["step"] for one in read_jsonl(folder.metrics)] == [0, 1, 2, 3]
    assert len(read_jsonl(folder.samples)) == 8
    assert [one["step"] for one in read_jsonl(folder.attempt(2) / "superseded-metrics.jsonl")] == [4, 5]
    assert len(read_jsonl(folder.attempt(2) / "superseded-samples.jsonl")) == 4
    assert resume.supersede(folder, 3, attempt) == 0, "nothing more to move"


def test_a_step_that_was_saved_and_not_logged_keeps_its_line(tmp_path):
    folder = RunDir(tmp_path)
    folder.new_attempt()
    append_jsonl(folder.metrics, {"step": 1, "attempt": 1})
    line = {"step": 2, "attempt": 1, "training/reward": 0.5}
    write_json(folder.checkpoints / "global_step_2" / STEP_METRICS, line)
    for attempt in (folder.new_attempt(), folder.new_attempt()):
        resume.supersede(folder, 2, attempt)
        assert read_jsonl(folder.metrics) == [{"step": 1, "attempt": 1}, line]


def test_after_half_a_line_the_next_one_is_not_lost(tmp_path):
    folder = RunDir(tmp_path)
    folder.new_attempt()
    append_jsonl(folder.metrics, {"step": 1})
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "rew')  # the disk was full
    resume.supersede(folder, 1, 1)
    append_jsonl(folder.metrics, {"step": 2})
    assert [one["step"] for one in read_jsonl(folder.metrics)] == [1, 2]


def test_a_line_cut_inside_a_letter_does_not_keep_the_run_from_going_on(tmp_path):
    folder = RunDir(tmp_path)
    attempt = folder.new_attempt()
    append_jsonl(folder.samples, {"step": 1, "rollout_id": "a"})
    with folder.samples.open("ab") as file:
        file.write('{"step": 2, "question": "Wie viele Stühle?"'.encode()[:-6])
        file.write("ü".encode()[:1])
    resume.supersede(folder, 1, attempt)
    assert read_jsonl(folder.samples) == [{"step": 1, "rollout_id": "a"}]


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_status_that_cannot_be_read_does_not_keep_the_run_from_going_on(tmp_path, text):
    folder = RunDir(tmp_path)
    folder.status.write_text(text)
    assert resume.finished(folder, 40) is None


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0c", "\x1c"])
def test_line_separators_inside_a_text_lose_no_row(tmp_path, odd):
    folder = RunDir(tmp_path)
    attempt = folder.new_attempt()
    for step in (1, 2, 3):
        append_jsonl(folder.samples, {"step": step, "replies": [f"a{odd}b"]})
    assert resume.supersede(folder, 2, attempt) == 0
    assert read_jsonl(folder.samples) == [{"step": step, "replies": [f"a{odd}b"]} for step in (1, 2)]
    assert [one["step"] for one in silent.read_rows(folder.samples)] == [1, 2]


def rows_in(folder, *references):
    for split in ("train", "val"):
        write_jsonl(folder.rows(split), [{"id": "1", "images": list(references)}])


def test_a_run_that_was_moved_finds_its_pictures(tmp_path):
    folder = RunDir(tmp_path / "b")
    folder.images.mkdir(parents=True)
    (folder.images / "1.png").touch()
    rows_in(folder, "file:///runs/a/images/1.png", "https://host/2.png")
    assert data.follow_move(folder) == 2 and data.follow_move(folder) == 0
    assert read_jsonl(folder.rows("val"))[0]["images"] == [f"file://{folder.images / '1.png'}", "https://host/2.png"]
    rows_in(folder, "file:///runs/a/images/gone.png")
    with pytest.raises(InputError, match=r"the picture gone\.png of its rows is not in .*; move the whole folder"):
        data.follow_move(folder)


def test_rows_of_no_run_are_neither_trained_on_nor_written_over(tmp_path):
    folder = RunDir(tmp_path)
    run.refuse_rows_of_no_run(folder)
    rows_in(folder, "x")
    with pytest.raises(InputError, match=r"train\.jsonl: rows without a run .*; remove this file"):
        run.refuse_rows_of_no_run(folder)


def test_a_start_that_is_refused_takes_back_its_rows_and_nothing_else(tmp_path):
    folder = RunDir(tmp_path / "own")
    (folder.root / "data").mkdir(parents=True)
    (folder.root / "data/precious.png").touch()
    rows_in(folder, "x")
    run.forget_rows(folder, new=False)
    assert [one.name for one in (folder.root / "data").iterdir()] == ["precious.png"]
    run.forget_rows(RunDir(tmp_path / "made"), new=True)
    run.forget_rows(folder, new=True)
    assert not folder.root.exists()


def test_a_resume_that_is_refused_leaves_the_configuration_as_it_was(tmp_path, monkeypatch):
    config = pytest.importorskip("omegaconf").OmegaConf.create(
        {"trainer": {"n_gpus_per_node": 2, "nnodes": 1, "resume_mode": "disable", "resume_from_path": None}}
    )
    folder = RunDir(tmp_path)
    folder.config.write_text("as: it was\n")

    def refused(*arguments):
        raise saving.SaveRefused("no room")

    monkeypatch.setattr(resume, "for_world_size", refused)
    with pytest.raises(saving.SaveRefused):
        run.begin_at(folder, config, resume.Start(), folder.new_attempt(), Display(1))
    assert folder.config.read_text() == "as: it was\n" and not folder.versions.exists()


def test_a_step_made_while_the_run_was_being_ended_counts(tmp_path):
    (tmp_path / "progress.jsonl").write_text('{"phase": "step", "step": 3}\n{"phase": "step", "step": 4}\n')
    assert supervise.newest_step(tmp_path) == 4 and supervise.newest_step(tmp_path / "none") == 0


class Moment:
    """``time`` as the supervisor sees it."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def ctrl_c(tmp_path, monkeypatch):
    moment, said = Moment(), []
    monkeypatch.setattr(supervise, "time", moment)
    stop = supervise._Stop(tmp_path, cast(Any, SimpleNamespace(say=said.append)))

    def at(seconds, phase, count=1, last=5.0):
        moment.now = seconds
        return stop.now(count, phase, last)

    at.asked, at.said = stop_file(tmp_path), said
    return at


def test_ctrl_c_gives_each_phase_its_time_and_a_save_all_it_needs(ctrl_c):
    assert ctrl_c(0, "rollout", count=0) is False
    assert ctrl_c(0, "rollout") is False and ctrl_c.asked.exists()
    assert ctrl_c.said == ["stopping after this step (Ctrl-C again: at once)"]
    assert ctrl_c(110, "training") is False and ctrl_c(220, "training") is False
    assert ctrl_c(225, "saving") is False and ctrl_c(5000, "saving") is False
    assert ctrl_c(5001, "saved") is False and ctrl_c(5200, "saved") is True


def test_ctrl_c_twice_ends_even_a_save(ctrl_c):
    assert ctrl_c(0, "saving") is False and ctrl_c(1, "saving", count=2) is True


def test_ctrl_c_in_a_long_step_ends_it_at_once_but_not_its_save(ctrl_c):
    assert ctrl_c(0, "saving", last=500.0) is False and ctrl_c(60, "saved", last=500.0) is True


@pytest.mark.parametrize(("phase", "last"), [("starting", None), ("rollout", 500.0)])
def test_ctrl_c_does_not_wait_for_what_is_not_short(ctrl_c, phase, last):
    assert ctrl_c(0, phase, last=last) is True and not ctrl_c.asked.exists()
    assert ctrl_c.said[0].startswith("stopping at once: ")


def test_the_watchdog_speaks_when_a_phase_is_silent_too_long():
    dog = Watchdog(total=40, now=0.0)
    assert dog.overdue(FIRST_LIMITS["starting"] - 1) is None
    assert "starting" in (dog.overdue(FIRST_LIMITS["starting"] + 1) or "")
    assert dog.overdue(FIRST_LIMITS["starting"] + 60) is None, "not again until the silence has doubled"
    assert dog.overdue(2 * FIRST_LIMITS["starting"] + 10) is not None


def test_the_watchdog_learns_how_long_a_phase_is_silent():
    dog, now = Watchdog(total=40, now=0.0), 0.0
    for step in range(1, 4):
        for phase, seconds in (("rollout", 2.0), ("training", 12.0)):
            dog.feed({"phase": phase, "step": step, "done": 1, "total": 8, "what": "update"}, now)
            now += seconds
    dog.feed({"phase": "training", "step": 4, "what": "update"}, now)
    assert dog.limit() == 120.0
    said = dog.overdue(now + 130.0)
    assert said is not None and "step 4/40: update" in said and "trainer.log" in said and "2 min 10 s" in said
    dog.feed({"phase": "rollout", "step": 4, "done": 0, "total": 8}, now)
    assert dog.limit() == 60.0 and "controller.log" in (dog.overdue(now + 61) or "")
