//! Starts one process a rank, completes their checkpoints, and puts the result together.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::checkpoint::{self, Saved};
use crate::control::Message;
use crate::field::hash_of_planes;
use crate::options::Options;
use crate::report::Report;

/// Workers connect within milliseconds of their start; between two looks this thread rests.
const ACCEPT_POLL: Duration = Duration::from_millis(1);

/// Runs the job and prints its result.
pub fn run(options: &Options) -> Result<(), String> {
    let from_step = starting_point(options)?;
    std::fs::create_dir_all(&options.dir)
        .map_err(|error| format!("{}: {error}", options.dir.display()))?;
    let mut report = Report::new(options.steps);
    let mut workers = Workers::start(options, from_step)?;
    let hash = collect(options, &mut workers, &mut report)?;
    report.end();
    println!("result {hash:016x}");
    println!("steps {}", options.steps);
    println!("from_step {}", from_step.unwrap_or(0));
    if options.report {
        report.print();
    }
    workers.wait()
}

/// Checks every complete checkpoint and prints a line for each.
pub fn verify(options: &Options) -> Result<(), String> {
    let mut damaged = 0;
    for step in checkpoint::completed(&options.dir)? {
        match checkpoint::verify(&options.dir, step) {
            Ok(ranks) => println!("step {step} whole {ranks}"),
            Err(what) => {
                println!("step {step} damaged");
                eprintln!("heat: {what}");
                damaged += 1;
            }
        }
    }
    if damaged == 0 {
        Ok(())
    } else {
        Err(format!("{damaged} checkpoints are damaged"))
    }
}

/// The checkpoint to begin from: the newest that is complete and whole.
fn starting_point(options: &Options) -> Result<Option<u64>, String> {
    let steps = checkpoint::completed(&options.dir)?;
    if !options.restart {
        return match steps.last() {
            None => Ok(None),
            Some(_) => Err(format!(
                "{} holds checkpoints; go on from them with --restart, or name an empty directory",
                options.dir.display()
            )),
        };
    }
    for &step in steps.iter().rev().filter(|&&step| step <= options.steps) {
        match checkpoint::verify(&options.dir, step) {
            Ok(ranks) if ranks == options.ranks => {
                eprintln!("  restart from step {step}");
                return Ok(Some(step));
            }
            Ok(ranks) => {
                return Err(format!(
                    "step {step} was written by {ranks} ranks; say --ranks {ranks}"
                ));
            }
            Err(what) => eprintln!("heat: {what}; trying an older checkpoint"),
        }
    }
    eprintln!("  no complete checkpoint, starting from the beginning");
    Ok(None)
}

/// The processes and the lines they send.
struct Workers {
    children: Vec<Child>,
    streams: Vec<UnixStream>,
    inbox: Receiver<(u32, Option<Message>)>,
}

impl Workers {
    fn start(options: &Options, from_step: Option<u64>) -> Result<Workers, String> {
        let socket = format!("firn-example-heat-{}", std::process::id());
        let listener = SocketAddr::from_abstract_name(&socket)
            .and_then(|address| UnixListener::bind_addr(&address))
            .map_err(|error| format!("cannot listen for workers: {error}"))?;
        listener
            .set_nonblocking(true)
            .map_err(|error| error.to_string())?;
        let (sender, inbox) = channel();
        let mut workers = Workers {
            children: Vec::new(),
            streams: Vec::new(),
            inbox,
        };
        workers
            .spawn(options, from_step, &socket)
            .map_err(|error| format!("cannot start a worker: {error}"))?;
        let mut streams = BTreeMap::new();
        while streams.len() < options.ranks as usize {
            let stream = workers.accept(&listener)?;
            let mut reader = BufReader::new(stream);
            let mut line = String::new();
            let hello = reader
                .read_line(&mut line)
                .ok()
                .and_then(|_| Message::parse(&line));
            let Some(Message::Hello(rank)) = hello else {
                return Err("a worker did not say its rank".into());
            };
            streams.insert(
                rank,
                reader
                    .get_ref()
                    .try_clone()
                    .map_err(|error| error.to_string())?,
            );
            forward(rank, reader, sender.clone());
        }
        workers.streams = streams.into_values().collect();
        Ok(workers)
    }

    /// The next worker that connects; looks meanwhile whether one has died before it could.
    fn accept(&mut self, listener: &UnixListener) -> Result<UnixStream, String> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("cannot take in a worker: {error}")),
            }
            for child in &mut self.children {
                if let Ok(Some(status)) = child.try_wait() {
                    return Err(format!("a worker ended with {status} before it began"));
                }
            }
            std::thread::sleep(ACCEPT_POLL);
        }
    }

    /// A ring of socket pairs: each rank's standard output meets the next one's standard input.
    fn spawn(
        &mut self,
        options: &Options,
        from_step: Option<u64>,
        socket: &str,
    ) -> std::io::Result<()> {
        let mut ups = Vec::new();
        let mut downs = Vec::new();
        for _ in 0..options.ranks {
            let (up, down) = UnixStream::pair()?;
            ups.push(OwnedFd::from(up));
            downs.push(OwnedFd::from(down));
        }
        downs.rotate_right(1);
        for (rank, (up, down)) in ups.into_iter().zip(downs).enumerate() {
            let mut command = Command::new(std::env::current_exe()?);
            command.args([
                "--steps",
                &options.steps.to_string(),
                "--every",
                &options.every.to_string(),
            ]);
            command.args([
                "--ranks",
                &options.ranks.to_string(),
                "--size",
                &options.size.to_string(),
            ]);
            command.arg("--dir").arg(&options.dir);
            command.args(options.fsync.then_some("--fsync"));
            if let Some(step) = from_step {
                command.args(["--worker-from", &step.to_string()]);
            }
            command.args([
                "--worker-socket",
                socket,
                "--worker-rank",
                &rank.to_string(),
            ]);
            self.children.push(
                command
                    .stdin(Stdio::from(down))
                    .stdout(Stdio::from(up))
                    .spawn()?,
            );
        }
        Ok(())
    }

    fn go(&mut self) -> Result<(), String> {
        for stream in &mut self.streams {
            stream
                .write_all(b"go\n")
                .map_err(|error| format!("a worker is gone: {error}"))?;
        }
        Ok(())
    }

    fn wait(mut self) -> Result<(), String> {
        for child in &mut self.children {
            match child.wait() {
                Ok(status) if status.success() => {}
                Ok(status) => return Err(format!("a worker ended with {status}")),
                Err(error) => return Err(format!("cannot wait for a worker: {error}")),
            }
        }
        Ok(())
    }
}

impl Drop for Workers {
    /// A failed job leaves no process behind.
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Hands the messages of one worker to the inbox; `None` is its end.
fn forward(rank: u32, reader: BufReader<UnixStream>, sender: Sender<(u32, Option<Message>)>) {
    std::thread::spawn(move || {
        for line in reader.lines().map_while(Result::ok) {
            if sender.send((rank, Message::parse(&line))).is_err() {
                return;
            }
        }
        let _ = sender.send((rank, None));
    });
}

/// Serves the workers until all are done; returns the hash of the final state.
fn collect(options: &Options, workers: &mut Workers, report: &mut Report) -> Result<u64, String> {
    let ranks = options.ranks as usize;
    let mut saved: BTreeMap<u32, Saved> = BTreeMap::new();
    let mut planes = BTreeMap::new();
    let mut done = vec![false; ranks];
    while done.contains(&false) {
        let (rank, message) = workers.inbox.recv().map_err(|_| "all workers are gone")?;
        match message {
            Some(Message::At(step)) => report.at(step),
            Some(Message::Saved(step, file)) => {
                saved.insert(rank, file);
                if saved.len() == ranks {
                    let files: Vec<Saved> = std::mem::take(&mut saved).into_values().collect();
                    checkpoint::complete(&options.dir, step, &files, options.fsync)?;
                    report.checkpoint(step, &files);
                    workers.go()?;
                }
            }
            Some(Message::Plane(plane, hash)) => drop(planes.insert(plane, hash)),
            Some(Message::Done) => done[rank as usize] = true,
            None if done[rank as usize] => {}
            Some(Message::Hello(_)) | None => {
                return Err(format!("rank {rank} ended before its time"));
            }
        }
    }
    Ok(hash_of_planes(planes.into_values()))
}
