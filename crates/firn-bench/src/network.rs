//! What benchmarks between hosts have in common: agents, and transfers beside the bare one.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

pub mod bare;

const START_LIMIT: Duration = Duration::from_secs(10);

/// What a transfer cost.
pub struct Transfer {
    /// How long it took.
    pub elapsed_s: f64,
    /// Processor time of its source.
    pub source_cpu_s: f64,
}

/// A `firn agent`, which ends with the value.
pub struct Agent(Ended);

impl Agent {
    /// Starts it by this command; returns when its record is in the backing.
    pub fn start(mut command: Command, record: &Path) -> anyhow::Result<Self> {
        // An earlier one may have left it.
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

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.0.0.id()
    }
}

/// A process that ends with the value.
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the files of `source` to `target`, by two programs that do nothing else. `sender` and `receiver` start this
/// program on the two hosts.
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

/// Seconds that a program takes.
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

/// Bytes that no program makes smaller.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    use rand::{RngExt, SeedableRng};
    let mut bytes = vec![0; len];
    rand::rngs::StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}
