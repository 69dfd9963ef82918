//! `firn bench pull`: a checkpoint on its way to another host.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use firn_config::size_text;
use firn_testfs::cleanup::Guard;
use firn_testfs::namespace::{Link, Namespace};

use crate::cpu;
use crate::firn::{Firn, Mount};
use crate::machine;
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Task};

pub mod bare;

const MB: f64 = 1e6;
const GIB: f64 = (1_u64 << 30) as f64;
const FILES: u64 = 4;
/// Writers one after the other: one alone is over too soon for a figure.
const WRITERS: u64 = 8;
/// What pullers call the source.
const HOST: &str = "source";
const START_LIMIT: Duration = Duration::from_secs(10);

const BARE: &str = "bare sendfile";
const COPY: &str = "cp through the mount";
const RSYNC: &str = "rsync";
const FIRN: &str = "firn pull";
const DISK: &str = "the disk alone";
const ALONE: &str = "alone";
const SLOW_LINK: &str = "while pulled over 1 Gbit/s";
const FAST_LINK: &str = "while pulled without a limit";

/// Pulls a checkpoint out of memory to another host.
///
/// Two network namespaces of this machine stand for the hosts; a veth joins them, so both share its processors.
/// Network: to tmpfs, beside a program that sends the same bytes of tmpfs files by sendfile(2) to one that writes them,
/// rsync (a daemon, no ssh) out of the mount, and cp on one host. Disk: to the file system of --dir, synced, beside the
/// network alone and the disk alone. Writer: a program that writes to the mount, alone and while its neighbours are
/// pulled over and over. Goals: at least 0.9 of bare sendfile, 1.5 times rsync and 0.9 of the slower of network and disk;
/// at most 0.3 s of the agent's processor time a GiB; the writer at least 0.85 of alone over a link of 1 Gbit/s.
/// Needs root, ip, tc and rsync.
#[derive(Clone, Debug, clap::Args)]
pub struct PullArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the checkpoint, in 4 files (default: 1G, quick 64M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
}

/// The two hosts and what runs on the first.
struct Site<'a> {
    firn: &'a Firn,
    mount: &'a Mount<'a>,
    namespace: &'a Namespace,
    link: &'a Link,
    /// The checkpoint on the mount, and the same bytes as files on tmpfs.
    source: PathBuf,
    plain: PathBuf,
    agent: Agent,
    bytes: u64,
}

/// A `firn agent`.
struct Agent {
    child: Child,
    backing: PathBuf,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long a transfer took, and the processor time of its source.
struct Transfer {
    elapsed_s: f64,
    source_cpu_s: f64,
}

impl PullArgs {
    pub fn common(&self) -> &Common {
        &self.common
    }

    fn bytes(&self) -> u64 {
        let bytes = self.size.unwrap_or(self.common.choose(1 << 30, 64 << 20));
        bytes.next_multiple_of(FILES << 20)
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let memory = firn.memory_dir()?;
        let mut guards: Vec<Guard> = Vec::new();
        let namespace = Namespace::create(&mut guards)?;
        let link = namespace.connect(&mut guards)?;
        namespace.add_address(&link, 2)?;
        let bytes = self.bytes();
        let backing = work.subdir("backing")?;
        let options = format!(
            "drain=demand,close=held,arena-size={}",
            2 * bytes + (1 << 30)
        );
        let mount = firn.mount(&backing, &work.subdir("mnt")?, &options)?;
        mount.wait_populated()?;
        let site = Site {
            firn: &firn,
            mount: &mount,
            namespace: &namespace,
            link: &link,
            source: mount.path().join("step_1"),
            plain: memory.join("plain"),
            agent: start_agent(&firn, &mount, &link, &backing)?,
            bytes,
        };
        site.write_checkpoint()?;
        let mut report = Report::new("pull");
        report.note(format!(
            "{} in {FILES} files, held in memory; two network namespaces on one machine, joined by a veth",
            size_text(bytes)
        ));
        self.measure_network(&site, &memory, &mut report)?;
        self.measure_disk(&site, &memory, &work, &mut report)?;
        self.measure_writer(&site, &memory, &mut report)?;
        drop(site);
        drop(mount);
        drop(guards);
        Ok(report)
    }

    fn measure_network(
        &self,
        site: &Site<'_>,
        memory: &Path,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let bar = progress(u64::from(self.common.repeats()), "network");
        let mut samples = vec![Vec::new(); 4];
        let mut costs = vec![Vec::new(); 2];
        for _ in 0..self.common.repeats() {
            let target = memory.join("copy");
            let bare = site.send_bare(&target)?;
            let pulled = site.pull(&target)?;
            samples[0].push(site.rate(bare.elapsed_s));
            samples[1].push(site.rate(site.copy(&target)?));
            samples[2].push(site.rate(site.rsync(&target, memory)?));
            samples[3].push(site.rate(pulled.elapsed_s));
            costs[0].push(site.cost(&bare));
            costs[1].push(site.cost(&pulled));
            bar.inc(1);
        }
        bar.finish_and_clear();
        let names = [BARE, COPY, RSYNC, FIRN].map(str::to_owned);
        report.add(
            "to tmpfs of another host",
            names.into_iter().zip(samples).collect(),
        );
        let case = report.cases.last().expect("it was added");
        let of_bare = case.ratio(FIRN, BARE, "throughput");
        let of_rsync = case.ratio(FIRN, RSYNC, "throughput");
        let names = [BARE, FIRN].map(str::to_owned);
        report.add(
            "processor time of the source",
            names.into_iter().zip(costs).collect(),
        );
        let cost = report
            .cases
            .last()
            .and_then(|case| case.median(FIRN, "cost"));
        report.judge(
            "firn pull to bare sendfile",
            Limit::Least(0.9),
            of_bare.as_slice(),
        );
        report.judge("firn pull to rsync", Limit::Least(1.5), of_rsync.as_slice());
        report.judge("agent, s/GiB", Limit::Most(0.3), cost.as_slice());
        Ok(())
    }

    fn measure_disk(
        &self,
        site: &Site<'_>,
        memory: &Path,
        work: &WorkDir,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let bar = progress(u64::from(self.common.repeats()), "disk");
        let mut samples = vec![Vec::new(); 3];
        let target = work.path().join("copy");
        for _ in 0..self.common.repeats() {
            samples[0].push(site.rate(site.write_disk(&target)?));
            samples[1].push(site.rate(site.send_bare(&memory.join("copy"))?.elapsed_s));
            samples[2].push(site.rate(site.pull(&target)?.elapsed_s));
            bar.inc(1);
        }
        bar.finish_and_clear();
        let names = [DISK, BARE, FIRN].map(str::to_owned);
        let title = format!(
            "to {} of another host, synced",
            machine::file_system_of(work.path())
        );
        report.add(title, names.into_iter().zip(samples).collect());
        let case = report.cases.last().expect("it was added");
        let ratios = [DISK, BARE].map(|limit| case.ratio(FIRN, limit, "throughput"));
        // The one to which it is nearest is the slower one.
        let of_slower = ratios.into_iter().flatten().reduce(f64::max);
        report.judge(
            "firn pull to the slower of network and disk",
            Limit::Least(0.9),
            of_slower.as_slice(),
        );
        Ok(())
    }

    fn measure_writer(
        &self,
        site: &Site<'_>,
        memory: &Path,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let bar = progress(u64::from(self.common.repeats()), "writer");
        let mut samples = vec![Vec::new(); 3];
        site.write_beside()?;
        for _ in 0..self.common.repeats() {
            samples[0].push(rate_of(site.write_beside()?));
            site.link.limit(Some("1gbit"))?;
            let slow = site.write_while_pulled(memory);
            site.link.limit(None)?;
            samples[1].push(rate_of(slow?));
            samples[2].push(rate_of(site.write_while_pulled(memory)?));
            bar.inc(1);
        }
        bar.finish_and_clear();
        let names = [ALONE, SLOW_LINK, FAST_LINK].map(str::to_owned);
        report.add(
            "a writer to the same mount",
            names.into_iter().zip(samples).collect(),
        );
        let case = report.cases.last().expect("it was added");
        let slowed = case.ratio(SLOW_LINK, ALONE, "throughput");
        report.judge(
            "writer while pulled over 1 Gbit/s to alone",
            Limit::Least(0.85),
            slowed.as_slice(),
        );
        Ok(())
    }
}

fn rate_of(bytes_per_s: f64) -> Sample {
    vec![("throughput", "MB/s", bytes_per_s / MB)]
}

fn start_agent(
    firn: &Firn,
    mount: &Mount<'_>,
    link: &Link,
    backing: &Path,
) -> anyhow::Result<Agent> {
    let listen = format!("{}:0", link.address(1));
    let child = firn
        .command()
        .args(["agent", "--host", HOST, "--listen", &listen])
        .arg(mount.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start `firn agent`")?;
    let mut agent = Agent {
        child,
        backing: backing.to_owned(),
    };
    let key = backing.join(format!(".firn/agent-{HOST}"));
    let begun = Instant::now();
    while !key.exists() {
        if agent.child.try_wait()?.is_some() || begun.elapsed() > START_LIMIT {
            bail!("`firn agent` did not start");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(agent)
}

impl Site<'_> {
    fn write_checkpoint(&self) -> anyhow::Result<()> {
        for dir in [&self.source, &self.plain] {
            std::fs::create_dir_all(dir)?;
        }
        for rank in 0..FILES {
            let data = noise(rank, (self.bytes / FILES) as usize);
            for dir in [&self.source, &self.plain] {
                std::fs::write(dir.join(format!("rank{rank}")), &data)?;
            }
        }
        Ok(())
    }

    fn rate(&self, elapsed_s: f64) -> Sample {
        rate_of(self.bytes as f64 / elapsed_s)
    }

    fn cost(&self, transfer: &Transfer) -> Sample {
        let cost = transfer.source_cpu_s / (self.bytes as f64 / GIB);
        vec![("cost", "s/GiB", cost)]
    }

    fn pull(&self, target: &Path) -> anyhow::Result<Transfer> {
        let agent = self.agent.child.id();
        let before = cpu::seconds_of(agent);
        let mut pull = self.pull_command(target);
        let elapsed_s = time(&mut pull)?;
        std::fs::remove_dir_all(target)?;
        Ok(Transfer {
            elapsed_s,
            source_cpu_s: cpu::seconds_of(agent) - before,
        })
    }

    fn pull_command(&self, target: &Path) -> Command {
        let mut pull = self
            .firn
            .command_by(|program| self.namespace.command(program));
        pull.args(["pull", "--backing"])
            .arg(&self.agent.backing)
            .arg(format!("{HOST}:{}", self.source.display()))
            .arg(target);
        pull
    }

    /// The same bytes, by two programs that do nothing else.
    fn send_bare(&self, target: &Path) -> anyhow::Result<Transfer> {
        std::fs::create_dir_all(target)?;
        let program = std::env::current_exe()?;
        let sender = bare::Sender::start(&program, &self.link.address(1), &self.plain)?;
        let mut receiver = self.namespace.command(&program.to_string_lossy());
        receiver.arg("receive").arg(sender.address()).arg(target);
        let elapsed_s = time(&mut receiver)?;
        let source_cpu_s = sender.wait()?;
        std::fs::remove_dir_all(target)?;
        Ok(Transfer {
            elapsed_s,
            source_cpu_s,
        })
    }

    fn copy(&self, target: &Path) -> anyhow::Result<f64> {
        let elapsed_s = time(Command::new("cp").arg("-r").arg(&self.source).arg(target))?;
        std::fs::remove_dir_all(target)?;
        Ok(elapsed_s)
    }

    fn rsync(&self, target: &Path, memory: &Path) -> anyhow::Result<f64> {
        let address = self.link.address(1);
        let config = memory.join("rsyncd.conf");
        let source = self.source.display();
        let text = format!("use chroot = no\n[ckpt]\npath = {source}\nuid = root\ngid = root\n");
        std::fs::write(&config, text)?;
        let port = bare::free_port(&address)?;
        let mut daemon = Command::new("rsync");
        daemon
            .args(["--daemon", "--no-detach", "--address", &address])
            .arg(format!("--port={port}"))
            .arg(format!("--config={}", config.display()));
        let daemon = daemon
            .stdin(Stdio::null())
            .spawn()
            .context("cannot run rsync: scripts/setup installs it")?;
        let _daemon = Ended(daemon);
        bare::wait_for_port(&address, port)?;
        let mut client = self.namespace.command("rsync");
        client
            .args(["-a", "--whole-file"])
            .arg(format!("rsync://{address}:{port}/ckpt/"))
            .arg(target);
        let elapsed_s = time(&mut client)?;
        std::fs::remove_dir_all(target)?;
        Ok(elapsed_s)
    }

    /// The files of tmpfs, to a disk.
    fn write_disk(&self, target: &Path) -> anyhow::Result<f64> {
        std::fs::create_dir_all(target)?;
        let begun = Instant::now();
        for rank in 0..FILES {
            let name = format!("rank{rank}");
            let mut dd = Command::new("dd");
            dd.arg(format!("if={}", self.plain.join(&name).display()))
                .arg(format!("of={}", target.join(&name).display()))
                .args(["bs=4M", "conv=fsync", "status=none"]);
            time(&mut dd)?;
        }
        let elapsed_s = begun.elapsed().as_secs_f64();
        std::fs::remove_dir_all(target)?;
        Ok(elapsed_s)
    }

    /// Bytes a second of programs that write over one file, one after the other.
    fn write_beside(&self) -> anyhow::Result<f64> {
        let count = (self.bytes >> 21).max(1);
        let task = Task::Write {
            path: self.mount.path().join("beside"),
            runs: vec![(count, 1 << 20)],
            sync: false,
            over: true,
        };
        let mut elapsed_s = 0.0;
        for _ in 0..WRITERS {
            elapsed_s += worker::elapsed_s(&worker::run_all(std::slice::from_ref(&task))?);
        }
        Ok(((WRITERS * count) << 20) as f64 / elapsed_s)
    }

    fn write_while_pulled(&self, memory: &Path) -> anyhow::Result<f64> {
        let stop = AtomicBool::new(false);
        let target = memory.join("copy");
        std::thread::scope(|scope| {
            let puller = scope.spawn(|| self.pull_until(&stop, &target));
            let written = self.write_beside();
            stop.store(true, Ordering::Relaxed);
            puller.join().expect("the puller's thread")?;
            written
        })
    }

    /// Over and over; the one under way at the end is killed.
    fn pull_until(&self, stop: &AtomicBool, target: &Path) -> anyhow::Result<()> {
        let mut pulled = Ok(());
        while !stop.load(Ordering::Relaxed) && pulled.is_ok() {
            let mut child = Ended(self.pull_command(target).stderr(Stdio::null()).spawn()?);
            while !stop.load(Ordering::Relaxed) {
                if let Some(status) = child.0.try_wait()? {
                    if !status.success() {
                        pulled = Err(anyhow::anyhow!("`firn pull` failed: {status}"));
                    }
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(child);
            for left in [target.to_owned(), target.with_file_name(".firn-pull-copy")] {
                if left.exists() {
                    std::fs::remove_dir_all(left)?;
                }
            }
        }
        pulled
    }
}

/// A process that ends with the value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Seconds that a program takes.
fn time(command: &mut Command) -> anyhow::Result<f64> {
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
fn noise(seed: u64, len: usize) -> Vec<u8> {
    use rand::{RngExt, SeedableRng};
    let mut bytes = vec![0; len];
    rand::rngs::StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}
