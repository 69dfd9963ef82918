//! Files in logs as a part of a mount: settles and flattens them, and answers requests about them. A log has one host's
//! writes to a file.
//!
//! To *settle* is to do what a close has left to do; to *flatten* is to make the plain file from its logs.

use std::sync::{Arc, mpsc};
use std::time::Instant;

use firn_backing::Errno;
use firn_config::Flatten;
use firn_engine::Engine;
use firn_format::durability::DurabilityLevel;
use firn_log::{LoggedTotals, Logs, UnflattenedFiles};
use firn_protocol::path::BytePath;
use firn_protocol::{HeldPolicy, Reply, Request, Status};
use parking_lot::Mutex;

use crate::error::{FlattenError, MountError};
use crate::logs::{FlattenRequest, Flattener, Settler, settle_at_unmount};
use crate::part::{ClientRequest, Part, Parts, StopContext};
use crate::replies::{deadline_after, failure_reply, throttle_progress, wait_for_level};
use crate::store::{Layers as _, Store};

/// Puts the number and size of logged files into the status.
fn fill_logged_figures(engine: &Engine<Store>, status: &mut Status) {
    let logs = engine.backing().log_layer();
    let logged = logs.map_or_else(LoggedTotals::default, |logs| logs.count_logged());
    status.logged_files = logged.files;
    status.logged_bytes = logged.own_bytes;
}

fn refusal_reply(error: &FlattenError) -> Reply {
    Reply::Error {
        errno: error.errno(),
        message: error.to_string(),
    }
}

/// The part of a request that ends when the files at and below a path are plain files.
struct FlattenWait<'a> {
    path: &'a BytePath,
    /// The level that the files must reach first.
    level: DurabilityLevel,
    deadline: Option<Instant>,
    /// Logs without their file are a failure too.
    fails_on_missing_file: bool,
}

impl<'a> FlattenWait<'a> {
    /// Returns the wait that a request asks for: until files in logs (each has one host's writes) have become plain
    /// files. `None` for a request that does not wait for that.
    fn from_request(request: &'a Request) -> Option<Self> {
        match request {
            Request::Wait {
                path,
                until,
                timeout_ms,
            } if *until >= DurabilityLevel::Drained => Some(Self {
                path,
                level: *until,
                deadline: deadline_after(*timeout_ms),
                fails_on_missing_file: false,
            }),
            Request::Flatten { path } => Some(Self {
                path,
                level: DurabilityLevel::Logged,
                deadline: None,
                fails_on_missing_file: true,
            }),
            _ => None,
        }
    }

    /// Waits until the files have reached the durability level (such as: the data is in the backing), and then calls
    /// `flatten`, which makes plain files from their logs. Returns the first error, or the reply of `flatten`.
    fn answer(
        &self,
        client_request: &mut ClientRequest<'_>,
        flatten: impl FnOnce(&mut dyn FnMut(Reply) -> bool) -> Reply,
    ) -> Reply {
        let engine = client_request.engine;
        match wait_for_level(
            engine,
            self.path,
            self.level,
            self.deadline,
            client_request.send_progress,
        ) {
            Reply::Done => flatten(client_request.send_progress),
            reply => reply,
        }
    }
}

/// The logs of a mount that may write.
pub(crate) struct WrittenLogs {
    engine: Arc<Engine<Store>>,
    flatten: Flatten,
    flattener: Flattener,
    /// The receiver for the settle thread, which takes it at its start.
    requests: Mutex<Option<mpsc::Receiver<FlattenRequest>>>,
    settler: Mutex<Option<Settler>>,
}

impl WrittenLogs {
    pub(crate) fn new(engine: &Arc<Engine<Store>>, flatten: Flatten) -> Arc<Self> {
        let (flattener, requests) = Flattener::new(engine);
        Arc::new(Self {
            engine: Arc::clone(engine),
            flatten,
            flattener,
            requests: Mutex::new(Some(requests)),
            settler: Mutex::new(None),
        })
    }

    /// Flattens the files of a request (makes plain files from their logs) and waits for that, until its deadline.
    /// Returns the reply: done, a timeout, or why files stay in logs.
    fn flatten(
        &self,
        wait: &FlattenWait<'_>,
        send_progress: &mut dyn FnMut(Reply) -> bool,
    ) -> Reply {
        let mut has_timed_out = false;
        let mut report_progress = throttle_progress("flattening", send_progress);
        let flattened = self.flattener.flatten(wait.path.as_bytes(), &mut || {
            has_timed_out = wait
                .deadline
                .is_some_and(|deadline| Instant::now() >= deadline);
            // How much is left to flatten is not known, but each message shows that the client is still there.
            !has_timed_out && report_progress(0, 0)
        });
        let remaining = match flattened {
            Ok(remaining) => remaining,
            Err(_) if has_timed_out => {
                return Reply::Error {
                    errno: libc::ETIMEDOUT,
                    message: "timed out: files in logs are still being flattened".into(),
                };
            }
            Err(error) => return failure_reply(error, wait.path),
        };
        match FlattenError::check_remaining(&remaining, wait.fails_on_missing_file) {
            Ok(()) => Reply::Done,
            Err(error) => refusal_reply(&error),
        }
    }
}

impl Part for WrittenLogs {
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        if let Some(requests) = self.requests.lock().take() {
            let settler = Settler::start(&self.engine, self.flatten, requests)
                .map_err(MountError::io("start the thread that settles logs"))?;
            *self.settler.lock() = Some(settler);
        }
        Ok(())
    }

    fn fill_status(&self, status: &mut Status) {
        fill_logged_figures(&self.engine, status);
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let wait = FlattenWait::from_request(client_request.request)?;
        Some(wait.answer(client_request, |send_progress| {
            self.flatten(&wait, send_progress)
        }))
    }

    /// Stops the settler, the thread that makes plain files from logs, and then makes plain files from the logs that
    /// remain, unless held data is to be kept. `context` gets the files that stay in logs.
    fn stop(&self, context: &mut StopContext) {
        // Without a settler the part was not started, or it is stopped already.
        let Some(settler) = self.settler.lock().take() else {
            return;
        };
        let engine = Arc::clone(&self.engine);
        let flatten = self.flatten;
        let flattens_now = context.held_policy != HeldPolicy::Keep;
        let (remaining_sender, remaining_receiver) = mpsc::channel();
        context.run_backing_work(move || {
            settler.stop();
            let remaining = match engine.backing().log_layer() {
                Some(logs) if flattens_now => settle_at_unmount(logs, flatten),
                _ => UnflattenedFiles::default(),
            };
            // The receiver is gone if the backing was given up.
            let _ = remaining_sender.send(remaining);
        });
        // If the backing does not answer, files may stay in logs.
        let unknown = UnflattenedFiles {
            error: flattens_now.then_some(Errno::TIMEDOUT),
            ..UnflattenedFiles::default()
        };
        context.remaining_in_logs = remaining_receiver.try_recv().unwrap_or(unknown);
    }
}

/// The logs of a read-only mount, which flattens nothing.
pub(crate) struct ReadLogs(pub(crate) Arc<Engine<Store>>);

impl ReadLogs {
    /// Returns an error if files at or below `path` lie in logs.
    fn refuse_logged(logs: &dyn Logs, path: &BytePath) -> Reply {
        match logs.count_below(path.as_bytes()) {
            Ok(0) => Reply::Done,
            Ok(files) => refusal_reply(&FlattenError::ReadOnly { files }),
            Err(error) => failure_reply(error, path),
        }
    }
}

impl Part for ReadLogs {
    fn fill_status(&self, status: &mut Status) {
        fill_logged_figures(&self.0, status);
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let wait = FlattenWait::from_request(client_request.request)?;
        let logs = self.0.backing().log_layer()?;
        Some(wait.answer(client_request, |_| Self::refuse_logged(logs, wait.path)))
    }
}
