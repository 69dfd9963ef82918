//! What `firn` alone says.

use std::fmt::Write;

use crate::output::Paint;
use crate::verb::VERBS;

const FIRST_STEPS: &str =
    "  firn mount /scratch/run42 /ckpt            programs write checkpoints to /ckpt
  firn status /ckpt                          data held and drained, errors
  firn wait --until durable /ckpt/step_100   until it would survive the loss of this host
  firn umount /ckpt                          drain, unmount
  ls /scratch/run42                          ordinary files
";

/// One screen: what it is, how to begin, what there is.
pub fn overview(paint: Paint) -> String {
    let mut text = format!(
        "{}, a file system for checkpoints\n\n",
        paint.head(concat!("firn ", env!("CARGO_PKG_VERSION")))
    );
    text += FIRST_STEPS;
    let _ = writeln!(text, "\n{}", paint.head("Verbs"));
    for verb in VERBS {
        let _ = writeln!(text, "  {:<12} {}", verb.name, verb.about);
    }
    text += "\n`firn VERB --help` explains a verb. After a crash, mount again: the data that was held is drained.\n";
    text
}
