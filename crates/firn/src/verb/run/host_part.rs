//! The part of `firn run` on one host: it mounts, makes durable what it is told to, and unmounts.
//!
//! A launcher starts it ([`super::launcher`]). firnd is its child, so a resource manager that ends what a process has
//! started (a step of Slurm) leaves both alone as long as this one lives.
//!
//! Promises
//! * SIGTERM and SIGINT, which a resource manager sends before it kills, make durable what is held. The mount stays: a job may still
//!   write its last checkpoint. firnd, which gets the same signal, leaves its end to this process.
//! * When `firn run` is gone (standard input ends), the mount ends too: as soon as no program uses it, or at the next signal.
//!   What has a backing is drained before.

use std::io::{self, BufReader};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use firn_client::{ClientError, Connection, Progress};
use firn_config::Frontend;
use firn_daemon::MountRequest;
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::{HeldPolicy, Request};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::message::{
    Keep, Mounted, Order, Report, ReportWanted, Setup, Word, read_order, send_word,
};
use super::place::RunDirs;
use super::{frontend_here, prune, restart};
use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};
use crate::progress::Meter;
use crate::report;
use crate::verb::umount::{failure_of, wait_for_end};

/// The first argument under which the binary is this.
pub const NAME: &str = "run-host";
/// How long a mount that was ordered to end waits for programs that use it, before it looks again.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Checkpoints that are told together: with paths of 4 KiB they have room in a word.
const CHECKPOINTS_PER_WORD: usize = 100;
/// Under Slurm the name of the host, which need not be its host name.
const SLURM_HOST: &str = "SLURMD_NODENAME";

/// What it waits for.
enum Event {
    Order(Order),
    Signal,
    /// The job's coordinator is gone.
    Alone,
}

/// Where words go.
#[derive(Clone)]
struct Speaker {
    id: u64,
    out: Arc<Mutex<io::Stdout>>,
}

impl Speaker {
    fn new() -> Result<Self, Failure> {
        let id = getrandom::u64()
            .map_err(|error| Failure::new(FAILED, format!("no random number: {error}")))?;
        let out = Arc::new(Mutex::new(io::stdout()));
        Ok(Self { id, out })
    }

    /// A word that does not arrive is not missed: standard input ends as well then.
    fn say(&self, word: &Word) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = send_word(&mut *out, self.id, word);
    }

    fn notice(&self, text: impl Into<String>) {
        self.say(&Word::Notice(text.into()));
    }
}

/// What `args` after [`NAME`] say: how often it says that it is there, in milliseconds.
pub fn main(args: &[std::ffi::OsString]) -> Result<u8, Failure> {
    let every_ms = args
        .first()
        .and_then(|text| text.to_str()?.parse::<u64>().ok())
        .filter(|every_ms| *every_ms > 0);
    let Some(every_ms) = every_ms else {
        let why = format!("firn {NAME} is started by `firn run` and by nothing else");
        return Err(Failure::new(USAGE, why));
    };
    let speaker = Speaker::new()?;
    let (sender, events) = channel();
    watch_signals(sender.clone())?;
    thread::spawn(move || pass_orders(&sender));
    speaker.say(&Word::Hello(name_of_host()));
    let beating = speaker.clone();
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_millis(every_ms));
            beating.say(&Word::Alive);
        }
    });
    serve(&speaker, &events)
}

fn name_of_host() -> String {
    let node = || {
        rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned()
    };
    std::env::var(SLURM_HOST).unwrap_or_else(|_| node())
}

fn watch_signals(events: Sender<Event>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
    thread::spawn(move || {
        for _ in &mut signals {
            let _ = events.send(Event::Signal);
        }
    });
    Ok(())
}

fn pass_orders(events: &Sender<Event>) {
    let mut from = BufReader::new(io::stdin());
    while let Ok(Some(order)) = read_order(&mut from) {
        if events.send(Event::Order(order)).is_err() {
            return;
        }
    }
    let _ = events.send(Event::Alone);
}

fn serve(speaker: &Speaker, events: &Receiver<Event>) -> Result<u8, Failure> {
    let setup = loop {
        match events.recv() {
            Ok(Event::Order(Order::Mount(setup))) => break setup,
            Ok(Event::Order(Order::Drain)) => {}
            // Nothing is mounted yet.
            Ok(Event::Order(Order::End(_)) | Event::Signal | Event::Alone) | Err(_) => {
                return Ok(DONE);
            }
        }
    };
    let mount = match HostMount::make(&setup, speaker) {
        Ok(mount) => mount,
        Err(failure) => {
            let (text, code) = told(failure);
            speaker.say(&Word::Failed { text, code });
            return Ok(code);
        }
    };
    speaker.say(&Word::Mounted(mount.describe()));
    let is_mine = |keep: &&Keep| keep.by.as_ref().is_none_or(|by| *by == name_of_host());
    let keep = setup.keep.as_ref().filter(is_mine);
    let pruning = keep.map(|keep| mount.start_pruning(keep.count, speaker));
    let end = mount.serve(speaker, events);
    drop(pruning);
    let report = match (end, &setup.report) {
        (Some(policy), None) => mount.take_down(policy, speaker),
        (Some(policy), Some(wanted)) => mount.take_down_and_tell(policy, wanted, speaker),
        (None, _) => mount.end_alone(events),
    };
    let code = report.failure.as_ref().map_or(DONE, |(_, code)| *code);
    speaker.say(&Word::Ended(report));
    Ok(code)
}

/// The mount of a run on this host.
struct HostMount {
    place: RunDirs,
    /// The preload library alone serves the files.
    is_tree: bool,
    romio_hints: Option<PathBuf>,
    /// Drains that were asked for and are not over.
    drains: Arc<AtomicU32>,
    /// A drain that does not come to its end any more is no fault.
    is_ending: Arc<AtomicBool>,
}

impl HostMount {
    fn make(setup: &Setup, speaker: &Speaker) -> Result<Self, Failure> {
        let path = |path: &Option<BytePath>| path.as_ref().map(|path| path.as_path().to_owned());
        let mut options = setup.options.clone();
        if setup.may_choose_frontend {
            options.frontend = frontend_here(&mut |text| speaker.notice(text));
        }
        let place = RunDirs::make(
            path(&setup.prefix),
            &setup.default_prefix,
            path(&setup.backing),
        )?;
        let is_tree = options.frontend == Frontend::Preload;
        let request = MountRequest {
            backing: place.backing.clone(),
            mount_point: place.prefix.clone(),
            options,
            foreground: false,
            ends_with_parent: true,
            changes: Vec::new(),
        };
        firn_daemon::mount_with_notices(request, &mut |text| speaker.notice(text))?;
        let mut mount = Self {
            place,
            is_tree,
            romio_hints: None,
            drains: Arc::default(),
            is_ending: Arc::default(),
        };
        let prepared = mount.prepare(setup);
        if let Err(failure) = prepared {
            mount.take_down(HeldPolicy::Keep, speaker);
            return Err(failure);
        }
        Ok(mount)
    }

    /// What a command needs beside the mount.
    fn prepare(&mut self, setup: &Setup) -> Result<(), Failure> {
        if let Some(hints) = &setup.romio_hints {
            self.romio_hints = Some(write_hints(&self.place, hints)?);
        }
        if let Some(restart) = &setup.restart
            && restart.to == name_of_host()
        {
            restart::restore(&restart.lost, &self.place.prefix, &self.place.backing)?;
        }
        Ok(())
    }

    fn describe(&self) -> Mounted {
        Mounted {
            prefix: self.place.prefix.clone().into(),
            backing: self.place.backing.clone().into(),
            is_tree: self.is_tree,
            romio_hints: self.romio_hints.clone().map(Into::into),
        }
    }

    /// Removes old checkpoints until the value is dropped.
    fn start_pruning(&self, keep: u32, speaker: &Speaker) -> Sender<()> {
        let (pruning, on_end) = channel();
        let prefix = self.place.prefix.clone();
        let speaker = speaker.clone();
        thread::spawn(move || {
            prune::prune_until(&on_end, &prefix, keep as usize, &mut |text| {
                speaker.notice(text);
            });
        });
        pruning
    }

    /// Serves until the mount is to end. Returns what becomes of held data then, or None if the coordinator is gone.
    fn serve(&self, speaker: &Speaker, events: &Receiver<Event>) -> Option<HeldPolicy> {
        loop {
            match events.recv() {
                Ok(Event::Signal | Event::Order(Order::Drain)) => self.start_drain(speaker),
                Ok(Event::Order(Order::Mount(_))) => {}
                Ok(Event::Order(Order::End(policy))) => return Some(policy),
                Ok(Event::Alone) | Err(_) => return None,
            }
        }
    }

    /// Makes durable what is held now, beside what comes next. Drains that are asked for meanwhile are one more.
    fn start_drain(&self, speaker: &Speaker) {
        if self.place.memory_only || self.drains.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let prefix = self.place.prefix.clone();
        let speaker = speaker.clone();
        let (is_ending, drains) = (Arc::clone(&self.is_ending), Arc::clone(&self.drains));
        thread::spawn(move || {
            loop {
                let asked = drains.load(Ordering::Acquire);
                let drained = make_durable(&prefix, &mut |_| {});
                if is_ending.load(Ordering::Acquire) {
                    return;
                }
                if let Err(error) = drained {
                    speaker.notice(format!("not all is durable yet: {error}"));
                }
                if drains.fetch_sub(asked, Ordering::AcqRel) == asked {
                    return;
                }
            }
        });
    }

    /// Unmounts, and tells what the report of the run is made of: names and sizes of checkpoints as long as they can be seen,
    /// and the record as it is at the end.
    fn take_down_and_tell(
        &self,
        policy: HeldPolicy,
        wanted: &ReportWanted,
        speaker: &Speaker,
    ) -> Report {
        let by = wanted.checkpoints_by.as_ref();
        let looks = by.is_none_or(|by| *by == name_of_host());
        let seen = report::Run::of_own_mount(&self.place.prefix, looks);
        let ended = self.take_down(policy, speaker);
        let mut seen = match seen {
            Ok(seen) => seen,
            Err(failure) => {
                speaker.say(&Word::NotReported(told(failure).0));
                return ended;
            }
        };
        seen.update_own(&self.place.backing);
        let all: Vec<report::CheckpointNow> = seen.checkpoints.into_values().collect();
        for some in all.chunks(CHECKPOINTS_PER_WORD) {
            speaker.say(&Word::Checkpoints(some.to_vec()));
        }
        for failure in seen.failures {
            speaker.say(&Word::NotReported(failure));
        }
        for record in seen.records {
            speaker.say(&Word::Record(Box::new(record)));
        }
        ended
    }

    /// Unmounts, also while programs of the command that were left behind use it.
    fn take_down(&self, policy: HeldPolicy, speaker: &Speaker) -> Report {
        self.remove_hints();
        let mut meter = Meter::quiet_if(true);
        let mut report = Report::default();
        let show = &mut |progress: Progress| {
            let (bytes, files) = (progress.bytes_left, progress.files_left);
            meter.show(bytes, files, &progress.phase);
            speaker.say(&Word::Left { bytes, files });
        };
        if let Err(failure) = self.end(policy, true, &mut report, show) {
            report.failure = Some(told(failure));
        }
        let waited = meter.waited();
        (report.waited_bytes, report.waited_files) = (waited.bytes, waited.files);
        if report.failure.is_none() && self.place.memory_only {
            self.remove_names(policy, &mut report);
        }
        report
    }

    /// Drains if so told, and unmounts.
    fn end(
        &self,
        policy: HeldPolicy,
        force: bool,
        report: &mut Report,
        show: &mut dyn FnMut(Progress),
    ) -> Result<(), Failure> {
        // What is refused here (files that are still open in logs) the unmount tries again, and says so.
        let mut not_durable = None;
        if policy == HeldPolicy::Drain {
            not_durable = make_durable(&self.place.prefix, show).err();
        }
        let place = firn_client::find(&self.place.prefix)?;
        let mut connection = Connection::open(&place.mount)?;
        let before = connection.status()?;
        self.is_ending.store(true, Ordering::Release);
        report.held_bytes = before.held_bytes;
        report.arena = before.arena.into();
        let (firnd, ended) = connection.unmount(force, policy, show)?;
        let written_files = ended.map_err(|error| failure_of(error, &place.mount))?;
        wait_for_end(&firnd, false);
        self.place.remove_default_prefix();
        if written_files > 0 {
            let text = format!(
                "{} stay in logs, which other hosts make plain",
                crate::text::count(written_files, "file")
            );
            return Err(Failure::new(PARTLY, text));
        }
        if policy != HeldPolicy::Drain {
            return Ok(());
        }
        report.held_bytes = 0;
        not_durable.map_or(Ok(()), |error| {
            let text = format!("all is drained, but not durable: {error}");
            Err(Failure::new(FAILED, text))
        })
    }

    /// The names of files that were in memory only go with them.
    fn remove_names(&self, policy: HeldPolicy, report: &mut Report) {
        let backing = &self.place.backing;
        if policy == HeldPolicy::Discard {
            if let Err(error) = std::fs::remove_dir_all(backing) {
                let shown = crate::text::path(backing);
                report.failure = Some((format!("cannot remove {shown}: {error}"), FAILED));
            }
        } else if report.held_bytes == 0 {
            let _ = std::fs::remove_file(&report.arena);
            // Not empty: there are names without data.
            let _ = std::fs::remove_dir(backing);
        }
    }

    /// Ends the mount when no program uses it any more, or at a signal.
    fn end_alone(&self, events: &Receiver<Event>) -> Report {
        self.remove_hints();
        let policy = if self.place.memory_only {
            HeldPolicy::Keep
        } else {
            HeldPolicy::Drain
        };
        let mut force = false;
        loop {
            let mut report = Report::default();
            match self.end(policy, force, &mut report, &mut |_| {}) {
                Err(_) if !force && firn_client::find(&self.place.prefix).is_ok() => {}
                Err(failure) => {
                    report.failure = Some(told(failure));
                    return report;
                }
                Ok(()) => return report,
            }
            match events.recv_timeout(LOOK_EVERY) {
                Ok(Event::Signal) => force = true,
                Ok(_) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }

    fn remove_hints(&self) {
        if let Some(hints) = &self.romio_hints {
            let _ = std::fs::remove_file(hints);
        }
    }
}

/// Makes durable what the mount holds now.
fn make_durable(
    prefix: &std::path::Path,
    show: &mut dyn FnMut(Progress),
) -> Result<(), ClientError> {
    let place = firn_client::find(prefix)?;
    let request = Request::Wait {
        path: place.relative,
        until: DurabilityLevel::Durable,
        timeout_ms: None,
    };
    Connection::open(&place.mount)?.wait(&request, show)
}

/// A file in the runtime directory, at the same path on all hosts, with hints for ROMIO.
fn write_hints(place: &RunDirs, hints: &str) -> Result<PathBuf, Failure> {
    let runtime = firn_client::paths::create_runtime_dir()?;
    let key = firn_client::Key::of(&place.prefix);
    let file = runtime.join(format!("{:016x}.romio-hints", key.0));
    // Only the user may change names in that directory.
    std::fs::write(&file, hints).map_err(|error| {
        let shown = crate::text::path(&file);
        Failure::new(FAILED, format!("cannot write {shown}: {error}"))
    })?;
    Ok(file)
}

fn told(failure: Failure) -> (String, u8) {
    match failure {
        Failure::Told { text, code } => (text, code),
        Failure::Unread => (String::from("its output is not read"), FAILED),
    }
}
