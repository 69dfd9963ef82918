//! The protocol between `firn run` and its host parts, which are its processes on the hosts.
//!
//! * `firn run` writes orders to the standard input of a host part, one line of JSON each.
//! * A host part writes messages to its standard output. A launcher such as srun may mix the outputs of many hosts, and
//!   may cut long lines. So a message is sent as *fragments*: short lines, each with the number of its sender.
//! * A line that does not begin with [`FRAGMENT_PREFIX`] is output of something else, such as a login script.
//!
//! *Held* data is in memory only. *Drained* data is in the backing, the directory in which files end up. A *lost* host
//! no longer answers.
//!
//! Bounds
//! * An order has at most `ORDER_BYTES_MAX` bytes, a message `MESSAGE_BYTES_MAX`, and a line of output
//!   `LINE_BYTES_MAX`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, Read, Write};
use std::path::PathBuf;

use firn_config::Options;
use firn_protocol::HeldPolicy;
use firn_protocol::path::BytePath;
use firn_protocol::record::{RECORD_BYTES_MAX, RunRecord};
use serde::{Deserialize, Serialize};

use crate::report::CurrentCheckpoint;

/// Maximum size of an order in bytes. Options have some kilobytes, and a file with ROMIO hints has at most 64 KiB.
const ORDER_BYTES_MAX: u64 = 1 << 20;
/// Maximum size of a message in bytes. The longest message is the record of a mount.
const MESSAGE_BYTES_MAX: usize = RECORD_BYTES_MAX as usize + (64 << 10);
/// Bytes of a line that are read at once. A longer line arrives in parts.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Bytes of text in a fragment. Slurm passes on lines of up to 1,024 bytes in one piece.
const FRAGMENT_BYTES: usize = 800;
/// First word of each line that is a fragment.
const FRAGMENT_PREFIX: &str = "firn-run";
/// Third word of each fragment before the last of its message.
const CONTINUES: &str = "+";
/// Third word of the last fragment of a message.
const ENDS: &str = ".";

/// An order of `firn run` to a host part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HostOrder {
    /// Mount according to the setup.
    Mount(Box<MountSetup>),
    /// Make the data that is held now durable. The mount remains.
    Drain,
    /// Unmount and end. The policy says what happens to held files.
    End(HeldPolicy),
}

/// What a host has to mount, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MountSetup {
    /// Directory where drained files end up. `None` means that files are in memory only.
    pub(super) backing: Option<BytePath>,
    /// Mount point. `None` means the directory `default_prefix` in the runtime directory.
    pub(super) prefix: Option<BytePath>,
    /// Name of the default mount point in the runtime directory.
    pub(super) default_prefix: String,
    /// Options of the mount.
    pub(super) options: Options,
    /// Whether a host may choose frontend=preload if FUSE cannot be used.
    pub(super) may_choose_frontend: bool,
    /// Content of the file for `ROMIO_HINTS`. `None` means that there is no such file.
    pub(super) romio_hints: Option<String>,
    /// The lost host whose files are restored from its partner, and the host that restores them.
    pub(super) restart: Option<RestartTask>,
    /// Which old checkpoints are removed while the command runs. `None` means that all of them stay.
    pub(super) keep: Option<Keep>,
    /// What hosts send for the report of the run before they end. `None` means that there is no report.
    pub(super) report: Option<ReportWanted>,
}

/// What hosts send for the report of a run. Each host also sends its own record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ReportWanted {
    /// The host that lists the checkpoints, if all hosts see the same files. `None` means that each host lists its own
    /// checkpoints.
    pub(super) checkpoints_by: Option<String>,
}

/// Number of checkpoints that are kept while the command runs, and the host that removes older checkpoints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Keep {
    /// Number of whole checkpoints that stay.
    pub(super) count: u32,
    /// The host that removes older checkpoints, if all hosts see the same files. `None` means that each host removes
    /// its own checkpoints.
    pub(super) by: Option<String>,
}

/// Which lost host's files are restored, and which host restores them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RestartTask {
    /// Name of the lost host.
    pub(super) lost: String,
    /// Name of the restoring host, as it gives it in [`HostMessage::Hello`].
    pub(super) to: String,
}

/// A message of a host to `firn run`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HostMessage {
    /// The host's part has started, and gives its name.
    Hello(String),
    /// The host's part is alive. It sends this at regular intervals.
    Alive,
    /// A message for the user.
    Notice(String),
    /// The mount is usable.
    Mounted(MountedHost),
    /// The mount failed, and the host's part ends.
    Failed {
        /// Reason of the failure.
        text: String,
        /// Exit status of the failure.
        code: u8,
    },
    /// Progress of the last drain.
    Left {
        /// Bytes that are not drained yet.
        bytes: u64,
        /// Files with bytes that are not drained yet.
        files: u64,
    },
    /// The record of what the mount did, for the report of the run.
    Record(Box<RunRecord>),
    /// A part of the list of checkpoints that existed before the unmount.
    Checkpoints(Vec<CurrentCheckpoint>),
    /// A sentence about something that the report of the run lacks.
    NotReported(String),
    /// The unmount is over, and the host's part ends.
    Ended(UnmountReport),
}

/// The mount of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MountedHost {
    /// Mount point.
    pub(super) prefix: BytePath,
    /// The backing.
    pub(super) backing: BytePath,
    /// Whether the mount is a stub tree (without FUSE), which only the preload library can read.
    pub(super) is_tree: bool,
    /// Path of the file with ROMIO hints, if there is one.
    pub(super) romio_hints: Option<BytePath>,
}

/// The result of a host's unmount.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct UnmountReport {
    /// The largest number of bytes that were left to drain.
    pub(super) waited_bytes: u64,
    /// The largest number of files that were left to drain.
    pub(super) waited_files: u64,
    /// Bytes that stay in memory.
    pub(super) held_bytes: u64,
    /// The arena that holds the bytes that stay.
    pub(super) arena: PathBuf,
    /// A message about what failed, and its exit status.
    pub(super) failure: Option<(String, u8)>,
}

/// Sends an order to the part of `firn run` on a host.
pub(super) fn send_order(stdin: &mut impl Write, order: &HostOrder) -> io::Result<()> {
    let mut line = serde_json::to_vec(order)?;
    line.push(b'\n');
    stdin.write_all(&line)?;
    stdin.flush()
}

/// Reads the next order. Returns `None` at the end of standard input, after which no order comes.
pub(super) fn read_order(stdin: &mut impl BufRead) -> io::Result<Option<HostOrder>> {
    let mut line = Vec::new();
    stdin.take(ORDER_BYTES_MAX).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Sends a message as fragments with the number of the sender.
pub(super) fn send_message(
    stdout: &mut impl Write,
    sender_id: u64,
    message: &HostMessage,
) -> io::Result<()> {
    let text = serde_json::to_string(message)?;
    stdout.write_all(split_into_fragments(sender_id, &text).as_bytes())?;
    stdout.flush()
}

/// Returns the lines that carry a message: fragments short enough not to be cut.
fn split_into_fragments(sender_id: u64, message_text: &str) -> String {
    let mut lines = String::new();
    let mut unsent_text = message_text;
    loop {
        let split_offset = unsent_text.floor_char_boundary(FRAGMENT_BYTES);
        let (fragment_text, later_text) = unsent_text.split_at(split_offset);
        let kind = if later_text.is_empty() {
            ENDS
        } else {
            CONTINUES
        };
        let _ = writeln!(
            lines,
            "{FRAGMENT_PREFIX} {sender_id:016x} {kind} {fragment_text}"
        );
        if later_text.is_empty() {
            return lines;
        }
        unsent_text = later_text;
    }
}

/// A piece of a launcher's output.
#[derive(Debug)]
pub(super) enum LauncherOutput {
    /// A complete message, and the number of its sender.
    Message(u64, Box<HostMessage>),
    /// A line that is not part of a message.
    Other(String),
}

/// Reads the output of a launcher, in which the messages of several hosts are mixed.
pub(super) struct MessageReader<R> {
    /// The output of the launcher.
    output: R,
    /// For each sender, the beginning of a message whose last fragment has not arrived yet.
    partial_messages: BTreeMap<u64, String>,
}

impl<R: BufRead> MessageReader<R> {
    pub(super) fn new(output: R) -> Self {
        Self {
            output,
            partial_messages: BTreeMap::new(),
        }
    }

    /// Adds a line of output. A message of a host arrives as fragments, one a line. Returns the message that the line
    /// completes, or `None` if more fragments must follow.
    ///
    /// A line that is not part of a valid message is returned as it is.
    fn add_line(&mut self, line: &str) -> Option<LauncherOutput> {
        let other_output = || Some(LauncherOutput::Other(line.to_owned()));
        let Some(fragment) = Fragment::parse(line) else {
            return other_output();
        };
        let partial_message = self.partial_messages.entry(fragment.sender_id).or_default();
        partial_message.push_str(fragment.text);
        // Fragments of a message without a last fragment must not fill the memory.
        if partial_message.len() > MESSAGE_BYTES_MAX {
            self.partial_messages.remove(&fragment.sender_id);
            return other_output();
        }
        if !fragment.is_last {
            return None;
        }
        let message_text = self
            .partial_messages
            .remove(&fragment.sender_id)
            .unwrap_or_default();
        match serde_json::from_str(&message_text) {
            Ok(message) => Some(LauncherOutput::Message(
                fragment.sender_id,
                Box::new(message),
            )),
            Err(_) => other_output(),
        }
    }
}

impl<R: BufRead> Iterator for MessageReader<R> {
    type Item = LauncherOutput;

    /// Returns the next piece of output. Returns `None` at the end of the output, or if reading fails.
    fn next(&mut self) -> Option<LauncherOutput> {
        loop {
            let mut line = Vec::new();
            let read_len = (&mut self.output)
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line);
            if !matches!(read_len, Ok(1..)) {
                return None;
            }
            let line = String::from_utf8_lossy(&line);
            if let Some(output) = self.add_line(line.trim_end_matches(['\n', '\r'])) {
                return Some(output);
            }
        }
    }
}

/// A line of output that is a part of a message: `firn-run SENDER KIND TEXT`.
struct Fragment<'a> {
    /// Number of the sender.
    sender_id: u64,
    /// Whether the message ends with this fragment.
    is_last: bool,
    /// Part of the JSON text of the message.
    text: &'a str,
}

impl<'a> Fragment<'a> {
    /// Parses a line, or returns `None` if it is no fragment.
    fn parse(line: &'a str) -> Option<Self> {
        let line_without_prefix = line.strip_prefix(FRAGMENT_PREFIX)?.strip_prefix(' ')?;
        let (sender_id, kind_and_text) = line_without_prefix.split_once(' ')?;
        let (kind, text) = kind_and_text.split_once(' ')?;
        let is_last = match kind {
            ENDS => true,
            CONTINUES => false,
            _ => return None,
        };
        Some(Self {
            sender_id: u64::from_str_radix(sender_id, 16).ok()?,
            is_last,
            text,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(lines: &str) -> Vec<LauncherOutput> {
        MessageReader::new(lines.as_bytes()).collect()
    }

    #[test]
    fn messages_of_several_hosts_may_be_mixed_line_by_line() {
        let notice = |text: &str| HostMessage::Notice(text.repeat(1000));
        let [a, b] = [(1, "ä"), (2, "b\n")].map(|(id, text)| {
            let json = serde_json::to_string(&notice(text)).unwrap();
            split_into_fragments(id, &json)
        });
        let longest = a.lines().chain(b.lines()).map(str::len).max().unwrap();
        assert!(longest < 1000, "{longest}");
        let mut mixed = String::from("Welcome to n17\n");
        let (mut a, mut b) = (a.lines(), b.lines());
        loop {
            let pair = [a.next(), b.next()];
            if pair == [None, None] {
                break;
            }
            for line in pair.into_iter().flatten() {
                mixed += &format!("{line}\n");
            }
        }
        let outputs = messages(&mixed);
        assert!(matches!(&outputs[0], LauncherOutput::Other(line) if line == "Welcome to n17"));
        let mut texts: Vec<(u64, String)> = outputs[1..]
            .iter()
            .map(|output| match output {
                LauncherOutput::Message(id, message) => match &**message {
                    HostMessage::Notice(text) => (*id, text.clone()),
                    message => panic!("{message:?}"),
                },
                LauncherOutput::Other(line) => panic!("{line}"),
            })
            .collect();
        texts.sort();
        assert_eq!(texts, [(1, "ä".repeat(1000)), (2, "b\n".repeat(1000))]);
    }

    #[test]
    fn what_is_no_word_is_output_of_something_else() {
        for line in [
            "firn-run",
            "firn-run 1 . {}",
            "firn-run x . \"alive\"",
            "firn-run 1 ? \"alive\"",
        ] {
            let outputs = messages(line);
            assert!(matches!(&outputs[..], [LauncherOutput::Other(other)] if other == line));
        }
        let outputs = messages("firn-run 1 . \"alive\"\r\n");
        assert!(matches!(&outputs[..], [LauncherOutput::Message(1, _)]));
    }

    #[test]
    fn a_word_without_end_is_not_kept() {
        let line = format!("firn-run 1 + {}\n", "x".repeat(800));
        let count = MESSAGE_BYTES_MAX / 800 + 2;
        let mut messages = MessageReader::new(io::Cursor::new(line.repeat(count)));
        assert!(matches!(messages.next(), Some(LauncherOutput::Other(_))));
        assert!(
            messages
                .partial_messages
                .values()
                .map(String::len)
                .sum::<usize>()
                <= MESSAGE_BYTES_MAX
        );
    }

    #[test]
    fn an_order_is_one_line() {
        let mut sent = Vec::new();
        send_order(&mut sent, &HostOrder::Drain).unwrap();
        send_order(&mut sent, &HostOrder::End(HeldPolicy::Keep)).unwrap();
        let mut from = sent.as_slice();
        assert!(matches!(read_order(&mut from), Ok(Some(HostOrder::Drain))));
        assert!(matches!(
            read_order(&mut from),
            Ok(Some(HostOrder::End(HeldPolicy::Keep)))
        ));
        assert!(matches!(read_order(&mut from), Ok(None)));
    }
}
