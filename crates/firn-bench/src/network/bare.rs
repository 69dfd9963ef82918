//! The simplest transfer of files between two hosts, as a baseline: sendfile(2) on one side, read(2) and write(2) on
//! the other.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::Ended;
use crate::cpu;

/// Bytes that the receiver reads at a time.
const BUFFER_BYTES: usize = 1 << 20;
/// Longest wait until a program listens.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Sends all files of a directory to the first client.
#[derive(Clone, Debug, clap::Args)]
pub struct SendArgs {
    address: String,
    dir: PathBuf,
}

/// Writes what it receives to one file for each that was sent.
#[derive(Clone, Debug, clap::Args)]
pub struct ReceiveArgs {
    address: String,
    dir: PathBuf,
}

impl SendArgs {
    /// Prints the address on which it listens, sends the files to the first client, and prints the processor time that
    /// this took.
    pub fn run(&self) -> anyhow::Result<()> {
        let listener = TcpListener::bind((self.address.as_str(), 0))?;
        println!("{}", listener.local_addr()?);
        let (mut socket, _) = listener.accept()?;
        let before = cpu::seconds_of_self();
        for entry in std::fs::read_dir(&self.dir)? {
            let file = File::open(entry?.path())?;
            let bytes = file.metadata()?.len();
            socket.write_all(&bytes.to_be_bytes())?;
            let mut at = 0;
            while at < bytes {
                let left = (bytes - at) as usize;
                if rustix::fs::sendfile(&socket, &file, Some(&mut at), left)? == 0 {
                    bail!("a file became shorter");
                }
            }
        }
        println!("{}", cpu::seconds_of_self() - before);
        Ok(())
    }
}

impl ReceiveArgs {
    /// Receives and writes files until the sender closes the connection. Each file comes after its length, a number of
    /// 8 bytes.
    pub fn run(&self) -> anyhow::Result<()> {
        let mut socket = TcpStream::connect(&self.address)?;
        let mut buffer = vec![0; BUFFER_BYTES];
        for number in 0.. {
            let mut length = [0; 8];
            match socket.read(&mut length)? {
                0 => return Ok(()),
                got => socket.read_exact(&mut length[got..])?,
            }
            let mut bytes_left = u64::from_be_bytes(length);
            let mut file = File::create(self.dir.join(format!("file{number}")))?;
            while bytes_left > 0 {
                let wanted = buffer.len().min(bytes_left as usize);
                let got = socket.read(&mut buffer[..wanted])?;
                if got == 0 {
                    bail!("the sender ended");
                }
                file.write_all(&buffer[..got])?;
                bytes_left -= got as u64;
            }
        }
        unreachable!("there is no last number")
    }
}

/// A process that sends files ([`SendArgs`]).
pub struct Sender {
    answers: BufReader<ChildStdout>,
    address: String,
    _program: Ended,
}

impl Sender {
    /// Starts the process and waits until it listens.
    pub fn start(mut command: Command, address: &str, dir: &Path) -> anyhow::Result<Self> {
        let child = command
            .args(["send", address])
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut program = Ended(child);
        let mut answers = BufReader::new(program.0.stdout.take().context("a pipe")?);
        let address = read_line_of(&mut answers)?;
        Ok(Self {
            answers,
            address,
            _program: program,
        })
    }

    /// Returns the address on which the process listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits until the process has sent the files, and returns its processor time in seconds.
    pub fn wait(mut self) -> anyhow::Result<f64> {
        Ok(read_line_of(&mut self.answers)?.parse()?)
    }
}

/// Reads one line that the process printed.
fn read_line_of(answers: &mut impl BufRead) -> anyhow::Result<String> {
    let mut line = String::new();
    if answers.read_line(&mut line)? == 0 {
        bail!("the sender failed");
    }
    Ok(line.trim_end().to_owned())
}

/// Returns a TCP port of `address` on which no program listens now.
pub fn free_port(address: &str) -> anyhow::Result<u16> {
    Ok(TcpListener::bind((address, 0))?.local_addr()?.port())
}

/// Waits until a program listens on a TCP port.
pub fn wait_for_port(address: &str, port: u16) -> anyhow::Result<()> {
    let begun = Instant::now();
    while TcpStream::connect((address, port)).is_err() {
        if begun.elapsed() > START_LIMIT {
            bail!("no process listens at {address}:{port}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
