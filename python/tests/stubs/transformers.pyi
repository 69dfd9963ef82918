# Of transformers 5.24.0, by make_stubs.py.
from typing import Any

class TrainingArguments:
    output_dir: str | None
    save_total_limit: int | None
    @property
    def world_size(self) -> Any: ...

class TrainerState:
    global_step: int
    best_model_checkpoint: str | None
    is_world_process_zero: bool

class TrainerControl:
    should_save: bool

class TrainerCallback:
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
