//! Makes requests that may hang, such as requests to firnd or to a file server, several at the same time.
//!
//! Promises
//! * Answers have the order of the questions.
//! * [`ask_child`] returns at its timeout, even if a file server does not answer. A call to a dead server may hang in
//!   the kernel so that even SIGKILL does not end it. A child process makes such a call, and is abandoned at the
//!   timeout. This process makes no such call, so its own threads can always end.

use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use firn_process::{Excess, Limits, RunError};
use serde::de::DeserializeOwned;

/// Maximum number of questions that are asked at the same time. Most of them wait for something other than a CPU, and
/// any of them may go to a firnd that is stopped, or to another program of its user.
const AT_ONCE: usize = 16;
/// Maximum size of a child's output in bytes: a line for each of some thousand hosts.
const OUTPUT_BYTES_MAX: usize = 32 << 20;
/// Extra time after the deadline, in which the killed child is reported as killed.
const GRACE: Duration = Duration::from_millis(50);

/// Asks all `questions`, at most `AT_ONCE` at a time. Returns the answers in the order of the questions.
pub fn ask_each<Q: Sync, A: Send>(questions: &[Q], ask: impl Fn(&Q) -> A + Sync) -> Vec<A> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut answers = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(question) = questions.get(index) else {
                return answers;
            };
            answers.push((index, ask(question)));
        }
    };
    let mut answers: Vec<(usize, A)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE.min(questions.len()))
            .map(|_| scope.spawn(work))
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(answers) => answers,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.flatten().collect()
    });
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Why a child gave no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChildFailure {
    /// The child exceeded its timeout and was killed.
    Late,
    /// The child printed a message instead, and ended with an exit status.
    Refused {
        /// The message, without `firn: ` before it.
        text: String,
        /// The exit status. `None` means that a signal killed the child.
        code: Option<u8>,
    },
    /// The child could not be started, or its output could not be read.
    NotRun(String),
}

/// Runs this program with `arguments` in a child process, and returns its answer.
///
/// The answer is the JSON at the end of the child's output; messages may precede it. An error says whether the child
/// exceeded `timeout`, refused, or could not be run.
pub fn ask_child<T: DeserializeOwned>(
    arguments: Vec<OsString>,
    timeout: Duration,
) -> Result<T, ChildFailure> {
    let deadline = Instant::now() + timeout;
    let (answer, answered) = mpsc::channel();
    // This thread waits for the child. The child may hang in the kernel, and the caller must return at the timeout.
    let started = std::thread::Builder::new().spawn(move || {
        let mut child = Command::new("/proc/self/exe");
        child.args(arguments);
        let limits = Limits {
            input: b"",
            output_bytes_max: OUTPUT_BYTES_MAX,
            excess: Excess::Discard,
            deadline,
        };
        let _ = answer.send(firn_process::run(child, limits));
    });
    if let Err(error) = started {
        return Err(ChildFailure::NotRun(error.to_string()));
    }
    match answered.recv_timeout(timeout + GRACE) {
        Ok(Ok(ended)) => {
            let text = ended.text();
            parse_answer(&text).ok_or_else(|| ChildFailure::Refused {
                text: text.strip_prefix("firn: ").unwrap_or(&text).to_owned(),
                code: ended.status.code().and_then(|code| u8::try_from(code).ok()),
            })
        }
        Ok(Err(RunError::Late)) | Err(_) => Err(ChildFailure::Late),
        Ok(Err(error)) => Err(ChildFailure::NotRun(error.to_string())),
    }
}

/// Returns the JSON at the end of a text: its last line, or everything from the first line that opens a list or an
/// object.
fn parse_answer<T: DeserializeOwned>(text: &str) -> Option<T> {
    let last = text.lines().last().unwrap_or_default();
    if let Ok(answer) = serde_json::from_str(last) {
        return Some(answer);
    }
    let begin = text.find("[\n").into_iter().chain(text.find("{\n")).min()?;
    serde_json::from_str(&text[begin..]).ok()
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
        let answers = ask_each(&questions, |question| {
            asked.lock().unwrap().push(*question);
            question * 2
        });
        assert_eq!(answers, (0..100).map(|one| one * 2).collect::<Vec<_>>());
        let mut asked = asked.into_inner().unwrap();
        asked.sort_unstable();
        assert_eq!(asked, questions);
        assert_eq!(ask_each(&[], |_: &u8| 1), [0; 0]);
    }
}
