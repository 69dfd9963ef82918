//! A process that makes the operations of a trace when it is told, one line after the other.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use firn_rules::trace::{TraceLine, TraceStep, parse_trace};

use crate::sandbox::helper_binary;

/// The bytes that a write of a line writes.
pub fn content(line: usize, len: u64) -> Vec<u8> {
    let start = line * 7;
    (start..start + len as usize)
        .map(|number| (number % 251) as u8)
        .collect()
}

/// The process. Dropped, it is killed.
pub struct Replayer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Replayer {
    /// Paths of its operations are below `dir`.
    pub fn start(dir: &Path) -> Self {
        let mut command = Command::new(helper_binary());
        command.arg("replay").arg(dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start the helper");
        Self {
            orders: child.stdin.take().expect("piped"),
            answers: BufReader::new(child.stdout.take().expect("piped")),
            child,
        }
    }

    /// Makes one operation; `text` is its line in the trace.
    pub fn make(&mut self, line: usize, text: &str) {
        writeln!(self.orders, "{line}:{text}").expect("the helper lives");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("an answer");
        assert_eq!(answer.trim(), "ok", "line {line}: {text}");
    }

    /// Waits for its end, after an exit was made.
    pub fn wait(mut self) {
        self.child.wait().expect("wait");
    }
}

impl Drop for Replayer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Files that the process has open, in the order in which they were opened.
type Open = HashMap<String, Vec<File>>;

/// What the process does.
pub fn serve(dir: &Path) {
    let mut open = Open::new();
    for order in io::stdin().lock().lines() {
        let order = order.expect("read");
        let (line, text) = order.split_once(':').expect("LINE:TEXT");
        let line: usize = line.parse().expect("a number");
        let steps = parse_trace(text, "/").expect("an operation");
        let step = &steps[0].step;
        match make(dir, line, step, &mut open) {
            Ok(()) => println!("ok"),
            Err(error) => println!("{error}"),
        }
        io::stdout().flush().expect("flush");
        if let TraceStep::Exit(code) = step {
            std::process::exit(i32::from(*code));
        }
    }
}

fn make(dir: &Path, line: usize, step: &TraceStep, open: &mut Open) -> io::Result<()> {
    let at = |path: &str| dir.join(path);
    match step {
        TraceStep::Mkdir(path) => fs::create_dir(at(path)),
        TraceStep::Open(path) => {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true);
            let file = options.open(at(path))?;
            open.entry(path.clone()).or_default().push(file);
            Ok(())
        }
        TraceStep::Write(path, len) => {
            let files = open.get_mut(path).expect("it is open");
            let file = files.last_mut().expect("it is open");
            file.write_all(&content(line, *len))
        }
        TraceStep::Close(path) => {
            let file = open.get_mut(path).and_then(Vec::pop);
            crate::fsops::close(file.expect("it is open")).map_err(io::Error::from)
        }
        TraceStep::Truncate(path) => OpenOptions::new().write(true).open(at(path))?.set_len(0),
        TraceStep::Rename(from, to) => fs::rename(at(from), at(to)),
        TraceStep::Link(from, to) => fs::hard_link(at(from), at(to)),
        TraceStep::Symlink(target, path) => symlink(target, at(path)),
        TraceStep::Unlink(path) => fs::remove_file(at(path)),
        TraceStep::Rmdir(path) => fs::remove_dir(at(path)),
        TraceStep::Exit(_) => Ok(()),
        TraceStep::Kill => unreachable!("the test kills"),
    }
}

/// A trace of one writer, with its lines as they are written.
pub struct Trace {
    /// The name of the writer.
    pub name: String,
    /// Names of the rules.
    pub rules: String,
    /// Its operations, numbered from 1.
    pub steps: Vec<TraceLine>,
    /// The same in words.
    pub lines: Vec<String>,
}

/// The traces of all writers; only that of the writer `FIRN_TRACE`, where it is set.
pub fn traces() -> Vec<Trace> {
    let dir: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../crates/firn-rules/traces"]
        .iter()
        .collect();
    let mut traces: Vec<Trace> = fs::read_dir(dir)
        .expect("traces")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let text = fs::read_to_string(&path).expect("a trace");
            let rules = text.lines().find_map(|line| line.strip_prefix("# rules: "));
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            let lines: Vec<String> = lines.map(str::to_owned).collect();
            Trace {
                name: path
                    .file_stem()
                    .expect("a name")
                    .to_string_lossy()
                    .into_owned(),
                rules: rules.expect("rules").to_owned(),
                steps: parse_trace(&lines.join("\n"), "/").expect("a trace"),
                lines,
            }
        })
        .collect();
    if let Ok(name) = std::env::var("FIRN_TRACE") {
        traces.retain(|trace| trace.name == name);
    }
    traces.sort_by(|a, b| a.name.cmp(&b.name));
    traces
}
