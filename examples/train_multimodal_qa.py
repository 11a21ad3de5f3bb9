"""Train a vision-language model on image questions with GRPO: Agent Lightning's trainer, verl's actor, vLLM's engine.

    python examples/train_multimodal_qa.py --preset cpu                      a tiny model, two CPU cores, no download
    python examples/train_multimodal_qa.py --preset qwen2_5_vl_3b            one GPU
    python examples/train_multimodal_qa.py --task circles --steps 60 data.train_batch_size=8

The same job as ``mmqa train``. What happens, in order: one configuration is composed (Agent Lightning's defaults, the
preset, the cache-safe engine settings, your key=value overrides) and checked; the pictures of the task go into the
run's image store; gateway, controller and trainer are started and watched. Each step asks the model about
``data.train_batch_size`` pictures ``rollout.n`` times, scores the answers, and moves the weights towards the better
answers of each group. At the end the run says what rose: the seeing, or only the form of the answer.
"""

import argparse

from agent.errors import InputError, RunFailed, one_line
from agent.training.run import train

parser = argparse.ArgumentParser(description="Train a vision-language model on image questions with GRPO.")
parser.add_argument("--preset", help="a name from examples/configs, or a YAML file (default: cpu, or the run's own)")
parser.add_argument("--task", help="circles, digits or folder (own data)")
parser.add_argument("--steps", type=int)
parser.add_argument("--run-dir", help="where the run is kept (default: runs/<preset>-<task>-<time>)")
parser.add_argument("--resume", help="go on with the run in --run-dir: auto, a step, or never (default: ask)")
parser.add_argument("overrides", nargs="*", metavar="key=value")

if __name__ == "__main__":
    options = parser.parse_args()
    try:
        train(
            options.preset,
            options.overrides,
            run_dir=options.run_dir,
            task=options.task,
            steps=options.steps,
            resume=options.resume,
        )
    except (InputError, RunFailed) as error:
        parser.exit(error.exit_code, f"error: {one_line(error)}\n")
    except KeyboardInterrupt:  # while the rows or the tiny model are being made; later the run itself stops in order
        parser.exit(1, "stopped before the first step\n")
