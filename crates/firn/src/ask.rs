//! Makes calls that may hang, several at the same time: calls to firnd, the daemon of a mount, or to a file server.
//!
//! Promises
//! * [`parallel_map`] returns the results in the order of the items.
//! * [`ask_child`] returns at its timeout, even if a file server does not answer. A call to a dead server may hang in
//!   the kernel so that even SIGKILL does not end it. A child process makes such a call, and is abandoned at the
//!   timeout. This process makes no such call, so its own threads can always end.

use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use firn_process::{ExcessOutput, Limits, RunError};
use serde::de::DeserializeOwned;

/// Maximum number of threads of [`parallel_map`]. It may exceed the number of CPUs: most calls wait for a file server
/// or for another process, and a stopped process makes its call wait until the timeout.
const THREADS_MAX: usize = 16;
/// Maximum size of a child's output in bytes: a line for each of some thousand hosts.
const OUTPUT_BYTES_MAX: usize = 32 << 20;
/// Extra time after the deadline, in which the killed child is reported as killed.
const KILL_REPORT_TIME: Duration = Duration::from_millis(50);

/// Calls `function` with each item, in at most [`THREADS_MAX`] threads at a time. Returns the results in the order of
/// the items. Panics if `function` panics.
pub fn parallel_map<T: Sync, R: Send>(items: &[T], function: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next_index = AtomicUsize::new(0);
    // Each thread takes the next item until none is left.
    let process_items = || {
        let mut results = Vec::new();
        loop {
            let index = next_index.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                return results;
            };
            results.push((index, function(item)));
        }
    };
    let thread_count = THREADS_MAX.min(items.len());
    let mut indexed_results: Vec<(usize, R)> = Vec::with_capacity(items.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..thread_count)
            .map(|_| scope.spawn(process_items))
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(results) => indexed_results.extend(results),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    indexed_results.sort_by_key(|(index, _)| *index);
    indexed_results
        .into_iter()
        .map(|(_, result)| result)
        .collect()
}

/// Why a child gave no output that could be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChildFailure {
    /// The child exceeded its timeout and was killed.
    TimedOut,
    /// The child printed a message instead, and ended with an exit status.
    Refused {
        /// The message, without `firn: ` before it.
        text: String,
        /// The exit status. `None` means that a signal killed the child.
        exit_status: Option<u8>,
    },
    /// The child could not be started, or its output could not be read.
    NotRun(String),
}

/// Runs this program with `arguments` in a child process, and returns the JSON at the end of its output. Messages may
/// precede the JSON.
///
/// Fails if the child exceeds `timeout`, ends with a message instead of the JSON, or cannot be run.
pub fn ask_child<T: DeserializeOwned>(
    arguments: Vec<OsString>,
    timeout: Duration,
) -> Result<T, ChildFailure> {
    let deadline = Instant::now() + timeout;
    let (result_sender, result_receiver) = mpsc::channel();
    // A thread waits for the child. The child may hang in the kernel, and the caller must return at the timeout.
    let spawned = std::thread::Builder::new().spawn(move || {
        let mut child = Command::new("/proc/self/exe");
        child.args(arguments);
        let limits = Limits {
            input: b"",
            output_bytes_max: OUTPUT_BYTES_MAX,
            excess: ExcessOutput::Discard,
            deadline,
        };
        // A caller that has reached its timeout no longer receives.
        let _ = result_sender.send(firn_process::run(child, limits));
    });
    if let Err(error) = spawned {
        return Err(ChildFailure::NotRun(error.to_string()));
    }
    // At `timeout` the thread kills the child. In the extra time it reports that, unless the child hangs.
    match result_receiver.recv_timeout(timeout + KILL_REPORT_TIME) {
        Ok(Ok(ended_child)) => parse_child_output(&ended_child),
        // `Late` means that the thread killed the child. `Err` means that the thread itself has not reported in time.
        Ok(Err(RunError::Late)) | Err(_) => Err(ChildFailure::TimedOut),
        Ok(Err(error)) => Err(ChildFailure::NotRun(error.to_string())),
    }
}

/// Returns the answer that a child printed. Without an answer, its output is the message of a refusal.
fn parse_child_output<T: DeserializeOwned>(
    child: &firn_process::EndedProgram,
) -> Result<T, ChildFailure> {
    let text = child.text();
    if let Some(answer) = parse_answer(&text) {
        return Ok(answer);
    }
    let exit_status = child.status.code();
    Err(ChildFailure::Refused {
        text: text.strip_prefix("firn: ").unwrap_or(&text).to_owned(),
        exit_status: exit_status.and_then(|status| u8::try_from(status).ok()),
    })
}

/// Returns the JSON at the end of a text, or `None` if it ends with no JSON of the type `T`.
///
/// The JSON is the last line, or everything from the first line that opens a list or an object.
fn parse_answer<T: DeserializeOwned>(text: &str) -> Option<T> {
    let last_line = text.lines().last().unwrap_or_default();
    if let Ok(answer) = serde_json::from_str(last_line) {
        return Some(answer);
    }
    let opening_offsets = [text.find("[\n"), text.find("{\n")];
    let json_offset = opening_offsets.into_iter().flatten().min()?;
    serde_json::from_str(&text[json_offset..]).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn an_answer_comes_after_messages_on_one_line_or_on_several() {
        assert_eq!(
            parse_answer::<Vec<u8>>("firn: [odd]\n[1,2]"),
            Some(vec![1, 2])
        );
        assert_eq!(
            parse_answer::<Vec<u8>>("firn: odd\n[\n  1,\n  2\n]"),
            Some(vec![1, 2])
        );
        assert_eq!(parse_answer::<Vec<u8>>("firn: no"), None);
    }

    #[test]
    fn answers_come_in_the_order_of_the_questions_and_each_is_asked_once() {
        let asked = Mutex::new(Vec::new());
        let questions: Vec<usize> = (0..100).collect();
        let answers = parallel_map(&questions, |question| {
            asked.lock().unwrap().push(*question);
            question * 2
        });
        assert_eq!(answers, (0..100).map(|one| one * 2).collect::<Vec<_>>());
        let mut asked = asked.into_inner().unwrap();
        asked.sort_unstable();
        assert_eq!(asked, questions);
        assert_eq!(parallel_map(&[], |_: &u8| 1), [0; 0]);
    }
}
