"""The same training with the task named, which trains the head as well."""

from case import train
from peft import TaskType

train(task=TaskType.SEQ_CLS)
