//! The overview of Firn and its verbs, which `firn` alone, `firn help` and `firn --help` print.

use std::fmt::Write;

use crate::output::Paint;
use crate::verb::GROUPS;

const FIRST_STEPS: &str =
    "  firn mount /scratch/run42 /ckpt            programs write checkpoints to /ckpt, at memory speed
  firn status /ckpt                          what is in memory, what is written, errors
  firn wait --until durable /ckpt/step_100   until it would survive the loss of this host
  firn umount /ckpt                          write the rest, unmount
  ls /scratch/run42                          ordinary files
";

/// Returns one screen: what Firn is, how to begin, and which verbs there are.
pub fn overview(paint: Paint) -> String {
    let mut text = format!(
        "{}, a file system for checkpoints\n\n",
        paint.head(concat!("firn ", env!("CARGO_PKG_VERSION")))
    );
    text += FIRST_STEPS;
    for group in GROUPS {
        let _ = writeln!(text, "\n{}", paint.head(group.title));
        for verb in group.verbs {
            let _ = writeln!(text, "  {:<12} {}", verb.name, verb.about);
        }
    }
    text += "\n`firn VERB --help` explains a verb. If the job or firnd was killed, mount again on the same host:\nwhat was in memory is written. A reboot loses what is not drained.\n";
    text
}
