//! What `firn` alone says.

use std::fmt::Write;

use crate::output::Paint;
use crate::verb::VERBS;

const FIRST_STEPS: &str =
    "  firn mount /scratch/run42 /ckpt            programs write checkpoints to /ckpt
  firn status /ckpt                          what is held, what is drained, errors
  firn wait --until durable /ckpt/step_100   until that checkpoint outlives the inode
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
    text += "\n`firn VERB --help` says more of each; after a crash, mount again: what was held drains by itself.\n";
    text
}
