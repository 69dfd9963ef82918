//! A process that holds one descriptor and does with it what it is told.
//!
//! Tests run in threads of one process: whenever one of them starts a program, every descriptor is
//! copied and, at its exec, closed. Where a close tells an errno once, that errno would be gone. Only
//! a process of its own closes a descriptor when the test says so.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::io::Errno;

use crate::fsops::{close, errno, open_rw};
use crate::random::bytes;
use crate::sandbox::helper_binary;

/// The process; killed when dropped, which closes the descriptor.
pub struct Hand {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Hand {
    /// Opens `path` for reading and writing, creating where needed.
    pub fn open(path: &Path) -> Self {
        let mut command = Command::new(helper_binary());
        command
            .arg("hand")
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("start the helper");
        let orders = child.stdin.take().expect("piped");
        let answers = child.stdout.take().expect("piped");
        let mut hand = Self {
            child,
            orders,
            answers: BufReader::new(answers),
        };
        hand.answer().expect("open");
        hand
    }

    /// pwrite(2) of `len` bytes of `key`.
    pub fn write(&mut self, key: u64, offset: u64, len: usize) -> Result<(), Errno> {
        self.order(&format!("write {key} {offset} {len}"))
    }

    /// close(2).
    pub fn close(mut self) -> Result<(), Errno> {
        self.order("close")
    }

    fn order(&mut self, line: &str) -> Result<(), Errno> {
        writeln!(self.orders, "{line}").expect("the helper takes orders");
        self.answer()
    }

    fn answer(&mut self) -> Result<(), Errno> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .expect("the helper answers");
        match line.trim().parse().expect("an errno") {
            0 => Ok(()),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The process's side: orders from standard input, an errno or 0 for each on standard output.
pub fn serve(path: &Path) {
    let mut file = Some(open_rw(path));
    println!("0");
    for line in std::io::stdin().lines() {
        let done = perform(&mut file, &line.expect("an order"));
        println!("{}", done.map_or_else(Errno::raw_os_error, |()| 0));
    }
}

fn perform(file: &mut Option<File>, line: &str) -> Result<(), Errno> {
    let number = |word: &str| word.parse::<u64>().expect("a number");
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["write", key, offset, len] => {
            let data = bytes(number(key), number(len) as usize);
            file.as_ref()
                .expect("open")
                .write_all_at(&data, number(offset))
                .map_err(|e| errno(&e))
        }
        ["close"] => close(file.take().expect("open")),
        _ => panic!("not an order: {line}"),
    }
}
