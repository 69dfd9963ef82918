//! Runs and times the programs of benchmarks between hosts: agents of Firn, and a bare transfer ([`bare`]) as the
//! baseline.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

pub mod bare;

/// Maximum time for the start of an agent.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Cost of a transfer.
pub struct Transfer {
    /// Duration in seconds.
    pub elapsed_s: f64,
    /// Processor time of the sending program in seconds.
    pub source_cpu_s: f64,
}

/// A running `firn agent`. Dropping the value kills it.
pub struct Agent(Ended);

impl Agent {
    /// Starts an agent with `command`, and waits until its record, the file by which other hosts find it, exists in the
    /// backing. Fails if the agent ends or the record does not appear within `START_LIMIT`.
    pub fn start(mut command: Command, record: &Path) -> anyhow::Result<Self> {
        // An earlier agent may have left its record.
        let _ = std::fs::remove_file(record);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start `firn agent`")?;
        let mut agent = Ended(child);
        let begun = Instant::now();
        while !record.exists() {
            if agent.0.try_wait()?.is_some() || begun.elapsed() > START_LIMIT {
                bail!("`firn agent` did not start");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Self(agent))
    }

    /// Returns the process id of the agent.
    pub fn pid(&self) -> u32 {
        self.0.0.id()
    }
}

/// A child process that is killed when the value is dropped.
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends the files of `source` to `target` with two programs that do nothing else, and returns the cost. Removes
/// `target` afterwards.
///
/// `sender` and `receiver` are commands that start this program on the two hosts.
pub fn send_bare(
    sender: Command,
    mut receiver: Command,
    address: &str,
    source: &Path,
    target: &Path,
) -> anyhow::Result<Transfer> {
    std::fs::create_dir_all(target)?;
    let sender = bare::Sender::start(sender, address, source)?;
    receiver.arg("receive").arg(sender.address()).arg(target);
    let elapsed_s = time(&mut receiver)?;
    let source_cpu_s = sender.wait()?;
    std::fs::remove_dir_all(target)?;
    Ok(Transfer {
        elapsed_s,
        source_cpu_s,
    })
}

/// Runs a program and returns the seconds that it took. Fails if the program fails.
pub fn time(command: &mut Command) -> anyhow::Result<f64> {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let begun = Instant::now();
    let output = command
        .output()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let elapsed_s = begun.elapsed().as_secs_f64();
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?} failed: {}", told.trim_end());
    }
    Ok(elapsed_s)
}

/// Returns `len` random bytes, which no program can compress. The same seed gives the same bytes.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    use rand::{RngExt, SeedableRng};
    let mut bytes = vec![0; len];
    rand::rngs::StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}
