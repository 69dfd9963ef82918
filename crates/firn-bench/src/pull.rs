//! `firn bench pull`: measures how fast a checkpoint is pulled to another host, and what that costs the source host.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use firn_config::size_text;
use firn_testfs::cleanup::Guard;
use firn_testfs::namespace::{Link, Namespace};

use crate::cpu;
use crate::firn::{Firn, Mount};
use crate::machine;
use crate::network::{self, Agent, Ended, Transfer, bare, noise, time};
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Task};

/// Units of the report in bytes.
const MB: f64 = 1e6;
const GIB: f64 = (1_u64 << 30) as f64;
/// Number of files of the checkpoint.
const FILES: u64 = 4;
/// Number of writer processes that run one after the other. A single one ends too soon for an exact figure.
const WRITERS: u64 = 8;
/// Name of the source host for the pullers.
const HOST: &str = "source";

/// Candidate: one program sends the bytes of tmpfs files with sendfile(2), and another writes them. It is the baseline.
const BARE: &str = "bare sendfile";
/// Candidate: cp(1) from the mount to tmpfs, on one host.
const COPY: &str = "cp through the mount";
/// Candidate: rsync(1) from a daemon that reads the mount.
const RSYNC: &str = "rsync";
/// Candidate: `firn pull` without encryption.
const FIRN: &str = "firn pull";
/// Candidate: `firn pull` with encryption.
const ENCRYPTED: &str = "firn pull --encrypt yes";
/// Value of `--encrypt` for no encryption: the addresses of the veth are private, so `auto` does not encrypt.
const NO_ENCRYPTION: &str = "auto";
/// Value of `--encrypt` for encryption.
const ENCRYPTION: &str = "yes";
/// Candidate: writes of the same bytes to the disk, without a network.
const DISK: &str = "the disk alone";
/// Case of the writer: no pull is running.
const ALONE: &str = "alone";
/// Case of the writer: pulls are running over a slow link.
const SLOW_LINK: &str = "while pulled over 1 Gbit/s";
/// Case of the writer: pulls are running over a fast link.
const FAST_LINK: &str = "while pulled without a limit";

/// Pulls a checkpoint out of memory to another host.
///
/// Two network namespaces of this machine stand for the hosts; a veth joins them, so both share its processors.
/// Needs root, ip, tc and rsync.
///
/// Network: a pull to tmpfs. It is compared with a program that sends the same bytes of tmpfs files by sendfile(2) to
/// one that writes them, with rsync out of the mount (a daemon, no ssh), with cp on one host, and with an encrypted
/// pull. Goals: at least 0.9 of the rate of bare sendfile, and 1.5 times that of rsync; at most 0.3 s of the agent's
/// processor time for each GiB.
///
/// Disk: a pull to the file system of --dir, synced. It is compared with the network alone and the disk alone. Goal:
/// at least 0.9 of the rate of the slower one.
///
/// Writer: a program that writes to the mount, alone and while the checkpoint is pulled again and again. Goal: at least
/// 0.85 of its rate alone, with pulls over a link of 1 Gbit/s.
#[derive(Clone, Debug, clap::Args)]
pub struct PullArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the checkpoint, in 4 files (default: 1G, quick 64M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Pull to tmpfs by this transport too, such as `ofi:tcp`, and leave the disk and the writer out.
    #[arg(long, value_name = "TRANSPORT")]
    transport: Option<String>,
    /// Measure only this.
    #[arg(long, value_name = "PART", value_enum, conflicts_with = "transport")]
    only: Option<Part>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// To tmpfs of another host.
    Network,
    /// To the file system of --dir.
    Disk,
    /// A program that writes to the mount meanwhile.
    Writer,
}

/// The two hosts, and the mount and the agent on the source host.
struct Site<'a> {
    firn: &'a Firn,
    /// The mount on the source host.
    mount: &'a Mount<'a>,
    /// The network of the other host.
    namespace: &'a Namespace,
    /// The connection of the two hosts.
    link: &'a Link,
    /// The directory of the checkpoint on the mount.
    source: PathBuf,
    /// A directory with the same files on tmpfs.
    plain: PathBuf,
    backing: PathBuf,
    agent: Agent,
    /// Size of the checkpoint.
    bytes: u64,
}

impl PullArgs {
    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    fn bytes(&self) -> u64 {
        let bytes = self.size.unwrap_or(self.common.choose(1 << 30, 64 << 20));
        bytes.next_multiple_of(FILES << 20)
    }

    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
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
        // The arena has room for the checkpoint and for the file of the writer, and some to spare.
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
            backing,
            bytes,
        };
        site.write_checkpoint()?;
        let mut report = Report::new("pull");
        report.note(format!(
            "{} in {FILES} files, held in memory; two network namespaces on one machine, joined by a veth",
            size_text(bytes)
        ));
        match &self.transport {
            Some(transport) => self.measure_transport(&site, &memory, transport, &mut report)?,
            None => self.measure_parts(&site, &memory, &work, &mut report)?,
        }
        // The agent ends before its mount, and the mount before the network.
        drop(site);
        drop(mount);
        drop(guards);
        Ok(report)
    }

    /// Measures the parts that the options select: pulls to memory of the other host, pulls to its disk, and a program
    /// that writes while another host pulls.
    fn measure_parts(
        &self,
        site: &Site<'_>,
        memory: &Path,
        work: &WorkDir,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let is_wanted = |part| self.only.is_none_or(|only| only == part);
        if is_wanted(Part::Network) {
            self.measure_network(site, memory, report)?;
        }
        if is_wanted(Part::Disk) {
            self.measure_disk(site, memory, work, report)?;
        }
        if is_wanted(Part::Writer) {
            self.measure_writer(site, memory, report)?;
        }
        Ok(())
    }

    /// Calls `measure` once for each repeat and returns the results. `measure` measures all candidates in turn.
    fn repeat<T>(
        &self,
        title: &str,
        mut measure: impl FnMut() -> anyhow::Result<T>,
    ) -> anyhow::Result<Vec<T>> {
        let bar = progress(u64::from(self.common.repeats()), title);
        let mut rounds = Vec::new();
        for _ in 0..self.common.repeats() {
            rounds.push(measure()?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(rounds)
    }

    /// Measures how fast the checkpoint arrives on a tmpfs of the other host, and the processor time that this costs
    /// the source host. Compares pulls with plain and encrypted connections, a bare transfer, cp(1) and rsync(1). Adds
    /// the cases and the goals to the report.
    fn measure_network(
        &self,
        site: &Site<'_>,
        memory: &Path,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let target = memory.join("copy");
        let rounds = self.repeat("network", || {
            let bare = site.send_bare(&target)?;
            let pulled = site.pull(&target, NO_ENCRYPTION)?;
            let encrypted = site.pull(&target, ENCRYPTION)?;
            let rates = [
                site.rate(bare.elapsed_s),
                site.rate(site.copy(&target)?),
                site.rate(site.rsync(&target, memory)?),
                site.rate(pulled.elapsed_s),
                site.rate(encrypted.elapsed_s),
            ];
            let costs = [&bare, &pulled, &encrypted].map(|transfer| site.cost(transfer));
            Ok((rates, costs))
        })?;
        let (rates, costs) = rounds.into_iter().unzip();
        report.add(
            "to tmpfs of another host",
            by_candidate([BARE, COPY, RSYNC, FIRN, ENCRYPTED], rates),
        );
        let case = report.cases.last().expect("it was added");
        let of_bare = case.ratio(FIRN, BARE, "throughput");
        let of_rsync = case.ratio(FIRN, RSYNC, "throughput");
        report.add(
            "processor time of the source",
            by_candidate([BARE, FIRN, ENCRYPTED], costs),
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

    /// Measures a pull with another transport, compared with TCP. There is no goal, because these transports are for
    /// hardware that this machine may not have.
    fn measure_transport(
        &self,
        site: &Site<'_>,
        memory: &Path,
        transport: &str,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let target = memory.join("copy");
        let rounds = self.repeat("transport", || {
            let by_tcp = site.pull_by("tcp", &target, NO_ENCRYPTION)?;
            let by_other = site.pull_by(transport, &target, NO_ENCRYPTION)?;
            let pulled = [&by_tcp, &by_other];
            let rates = pulled.map(|transfer| site.rate(transfer.elapsed_s));
            Ok((rates, pulled.map(|transfer| site.cost(transfer))))
        })?;
        let (rates, costs) = rounds.into_iter().unzip();
        let names = ["tcp", transport];
        report.add(
            "to tmpfs of another host, by transport",
            by_candidate(names, rates),
        );
        report.add("processor time of the source", by_candidate(names, costs));
        Ok(())
    }

    /// Measures how fast a pull to a disk of the other host is, with the sync at its end. Compares it with the disk
    /// alone and with the network alone. Adds the case and its goal to the report.
    fn measure_disk(
        &self,
        site: &Site<'_>,
        memory: &Path,
        work: &WorkDir,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let target = work.path().join("copy");
        let rates = self.repeat("disk", || {
            Ok([
                site.rate(site.write_disk(&target)?),
                site.rate(site.send_bare(&memory.join("copy"))?.elapsed_s),
                site.rate(site.pull(&target, NO_ENCRYPTION)?.elapsed_s),
            ])
        })?;
        let title = format!(
            "to {} of another host, synced",
            machine::file_system_of(work.path())
        );
        report.add(title, by_candidate([DISK, BARE, FIRN], rates));
        let case = report.cases.last().expect("it was added");
        let ratios = [DISK, BARE].map(|limit| case.ratio(FIRN, limit, "throughput"));
        // The ratio to the slower one of disk and network is the larger ratio.
        let of_slower = ratios.into_iter().flatten().reduce(f64::max);
        report.judge(
            "firn pull to the slower of network and disk",
            Limit::Least(0.9),
            of_slower.as_slice(),
        );
        Ok(())
    }

    /// Measures how much pulls slow down a program that writes to the same mount: without a pull, and while the
    /// checkpoint is pulled again and again over a slow and a fast link. Adds the case and its goal to the report.
    fn measure_writer(
        &self,
        site: &Site<'_>,
        memory: &Path,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        // This run creates the file, so that all measured runs overwrite it.
        site.run_writers()?;
        let rates = self.repeat("writer", || {
            let alone = site.run_writers()?;
            site.link.limit(Some("1gbit"))?;
            let slow = site.write_while_pulled(memory);
            // The limit is removed before an error of the writer is returned.
            site.link.limit(None)?;
            let slow = slow?;
            let fast = site.write_while_pulled(memory)?;
            Ok([alone, slow, fast].map(rate_of))
        })?;
        report.add(
            "a writer to the same mount",
            by_candidate([ALONE, SLOW_LINK, FAST_LINK], rates),
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

/// Groups samples by candidate. Each round has one sample of each candidate.
fn by_candidate<const COUNT: usize>(
    names: [&str; COUNT],
    rounds: Vec<[Sample; COUNT]>,
) -> Vec<(String, Vec<Sample>)> {
    let mut candidates: Vec<_> = names
        .into_iter()
        .map(|name| (name.to_owned(), Vec::new()))
        .collect();
    for round in rounds {
        for ((_, samples), sample) in candidates.iter_mut().zip(round) {
            samples.push(sample);
        }
    }
    candidates
}

/// Returns a rate as the sample of a candidate.
fn rate_of(bytes_per_s: f64) -> Sample {
    vec![("throughput", "MB/s", bytes_per_s / MB)]
}

/// Starts the agent of the mount on the source host.
fn start_agent(
    firn: &Firn,
    mount: &Mount<'_>,
    link: &Link,
    backing: &Path,
) -> anyhow::Result<Agent> {
    let listen = format!("{}:0", link.address(1));
    let mut command = firn.command();
    command
        .args(["agent", "--host", HOST, "--listen", &listen])
        .arg(mount.path());
    Agent::start(command, &backing.join(format!(".firn/agent-{HOST}")))
}

impl Site<'_> {
    /// Writes the same random files to the mount and to tmpfs.
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

    /// Returns the rate of a transfer of the checkpoint.
    fn rate(&self, elapsed_s: f64) -> Sample {
        rate_of(self.bytes as f64 / elapsed_s)
    }

    /// Returns the processor time of the source for each GiB.
    fn cost(&self, transfer: &Transfer) -> Sample {
        let cost = transfer.source_cpu_s / (self.bytes as f64 / GIB);
        vec![("cost", "s/GiB", cost)]
    }

    /// Pulls the checkpoint over TCP, and removes the copy.
    fn pull(&self, target: &Path, encrypt: &str) -> anyhow::Result<Transfer> {
        self.pull_by("tcp", target, encrypt)
    }

    /// Pulls the checkpoint with this transport, and removes the copy.
    fn pull_by(&self, transport: &str, target: &Path, encrypt: &str) -> anyhow::Result<Transfer> {
        let agent = self.agent.pid();
        let before = cpu::seconds_of(agent);
        let mut pull = self.pull_command(target, encrypt);
        pull.args(["--transport", transport]);
        let elapsed_s = time(&mut pull)?;
        std::fs::remove_dir_all(target)?;
        Ok(Transfer {
            elapsed_s,
            source_cpu_s: cpu::seconds_of(agent) - before,
        })
    }

    /// Returns the command that pulls the checkpoint on the other host.
    fn pull_command(&self, target: &Path, encrypt: &str) -> Command {
        let mut pull = self
            .firn
            .command_by(|program| self.namespace.command(program));
        pull.args(["pull", "--encrypt", encrypt, "--backing"])
            .arg(&self.backing)
            .arg(format!("{HOST}:{}", self.source.display()))
            .arg(target);
        pull
    }

    /// Sends the same files from tmpfs with two programs that do nothing else ([`network::send_bare`]).
    fn send_bare(&self, target: &Path) -> anyhow::Result<Transfer> {
        let program = std::env::current_exe()?;
        let receiver = self.namespace.command(&program.to_string_lossy());
        let sender = Command::new(program);
        network::send_bare(sender, receiver, &self.link.address(1), &self.plain, target)
    }

    /// Copies the checkpoint on the source host with cp(1), and removes the copy. Returns the seconds that this took.
    fn copy(&self, target: &Path) -> anyhow::Result<f64> {
        let elapsed_s = time(Command::new("cp").arg("-r").arg(&self.source).arg(target))?;
        std::fs::remove_dir_all(target)?;
        Ok(elapsed_s)
    }

    /// Copies the checkpoint to the other host from a daemon of rsync(1), and removes the copy. Returns the seconds
    /// that this took.
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

    /// Copies the files from tmpfs to a disk and syncs them. Returns the seconds that this took.
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

    /// Measures the rate of programs that overwrite one file of the mount, one after the other, in bytes per second.
    fn run_writers(&self) -> anyhow::Result<f64> {
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

    /// Measures as [`Site::run_writers`] does, while the checkpoint is pulled again and again.
    fn write_while_pulled(&self, memory: &Path) -> anyhow::Result<f64> {
        let stop = AtomicBool::new(false);
        let target = memory.join("copy");
        std::thread::scope(|scope| {
            let puller = scope.spawn(|| self.pull_until(&stop, &target));
            let written = self.run_writers();
            stop.store(true, Ordering::Relaxed);
            puller.join().expect("the puller's thread")?;
            written
        })
    }

    /// Pulls the checkpoint again and again until `stop` is set. Then kills the pull that is still running: dropping
    /// `child` does that.
    fn pull_until(&self, stop: &AtomicBool, target: &Path) -> anyhow::Result<()> {
        let mut pulled = Ok(());
        while !stop.load(Ordering::Relaxed) && pulled.is_ok() {
            let mut child = Ended(
                self.pull_command(target, NO_ENCRYPTION)
                    .stderr(Stdio::null())
                    .spawn()?,
            );
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
            // The copy, and the unfinished copy of a killed pull.
            for left in [target.to_owned(), target.with_file_name(".firn-pull-copy")] {
                if left.exists() {
                    std::fs::remove_dir_all(left)?;
                }
            }
        }
        pulled
    }
}
