"""The order of the data over a resume, on the loader and the samplers that verl uses, and in runs of the real stack."""

import subprocess

import pytest
from small_run import PROMPTS, SMALL, needs_engine, train

from agent.training import data_order
from agent.training.rundir import RunDir, read_jsonl

ROWS, BATCH = 17, 4
EPOCH = ROWS // BATCH  # batches; the loader drops the odd row
TOTAL = 3 * EPOCH + 2


def loader(shuffle=True, workers=0):
    """As verl's ``create_rl_sampler`` and ``_create_dataloader`` make it."""
    torch = pytest.importorskip("torch")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    from torchdata.stateful_dataloader.sampler import RandomSampler

    rows = list(range(ROWS))
    sampler = torch.utils.data.SequentialSampler(rows)
    if shuffle:
        sampler = RandomSampler(data_source=rows, generator=torch.Generator().manual_seed(1))
    return stateful.StatefulDataLoader(
        rows, batch_size=BATCH, num_workers=workers, drop_last=True, sampler=sampler, collate_fn=list
    )


def batches(made, count):
    """``count`` batches, each with the loader's state after it, epoch after epoch as Agent Lightning takes them."""
    taken, states, passing = [], [], iter(made)
    while len(taken) < count:
        batch = next(passing, None)
        if batch is None:
            passing = iter(made)
            continue
        taken.append(batch)
        states.append(made.state_dict())
    return taken, states


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_from_any_step_the_order_goes_on(shuffle, workers):
    """From the end of an epoch and from inside one, and once more from what the resumed loader saved."""
    whole, states = batches(loader(shuffle, workers), TOTAL)
    assert not shuffle or whole[:EPOCH] != whole[EPOCH : 2 * EPOCH]
    for step in range(1, TOTAL) if workers == 0 else (EPOCH, EPOCH + 1):
        resumed = loader(shuffle, workers)
        data_order.go_on(resumed, states[step - 1])
        rest, later = batches(resumed, TOTAL - step)
        assert rest == whole[step:], step
        again = loader(shuffle, workers)
        ahead = EPOCH - step % EPOCH
        if step + ahead < TOTAL:
            data_order.go_on(again, later[ahead - 1])
            assert batches(again, TOTAL - step - ahead)[0] == whole[step + ahead :], step


def test_left_to_verl_the_order_of_the_first_epoch_would_come_again():
    whole, states = batches(loader(), TOTAL)
    assert batches(loader(), EPOCH)[0] == whole[:EPOCH] != whole[EPOCH : 2 * EPOCH]
    spent = loader()
    spent.load_state_dict(states[EPOCH - 1])
    assert list(spent) == [], "the state as it is: one pass without a batch"


@pytest.mark.parametrize(
    ("step", "steps_per_epoch", "ends"), [(4, 4, True), (8, 4, True), (3, 4, False), (0, 4, False), (4, 0, False)]
)
def test_the_end_of_an_epoch_is_where_verl_sees_it(step, steps_per_epoch, ends):
    assert data_order.ends_epoch(step, steps_per_epoch) is ends


def asked(root):
    """The questions of each step's groups."""
    samples = [one for one in read_jsonl(RunDir(root).samples) if one["split"] == "train"]
    return {
        step: sorted({(one["images"][0].rsplit("/", 1)[1], one["question"]) for one in samples if one["step"] == step})
        for step in sorted({one["step"] for one in samples})
    }


@pytest.mark.engine
@pytest.mark.timeout(900)
@needs_engine
def test_a_run_that_stopped_between_two_epochs_asks_what_it_would_have_asked(tmp_path):
    """The run directories are reached through a link, as scratch disks often are."""
    epoch = 2
    (tmp_path / "disk").mkdir()
    runs = tmp_path / "runs"
    runs.symlink_to("disk")
    small = ("--preset", "cpu", *SMALL, f"mmqa.train_samples={epoch * PROMPTS}", "trainer.test_freq=-1")
    small = (*small, f"trainer.save_freq={epoch}")
    for root, *arguments in (
        ("whole", *small, "--steps", 2 * epoch + 1),
        ("parts", *small, "--steps", epoch),
        ("parts", "--resume", "auto", "--steps", 2 * epoch),
        ("parts", "--resume", "auto", "--steps", 2 * epoch + 1),
    ):
        command = train(runs / root, *map(str, arguments))
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    whole, parts = asked(runs / "whole"), asked(runs / "parts")
    assert list(whole) == list(parts) == list(range(1, 2 * epoch + 2))
    assert parts == whole
    assert whole[1] != whole[1 + epoch], "or the order of the first epoch would do as well"
    log = (runs / "parts/attempts/2/trainer.log").read_text()
    assert "Skipping dataloader state restore" in log and "mmqa: the order of the data goes on from" in log
