//! `firn-lab partner`: checkpoints in the memory of a partner host.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use firn_config::size_text;
use firn_testfs::cleanup::{Guard, Leftover, expect};
use firn_testfs::namespace::{Network, NetworkHost};

use crate::serve::{Model, Mounted, Server, client_point};
use firn_bench::firn::{Firn, Mount};
use firn_bench::network::{self, Agent, Ended, noise};
use firn_bench::options::{Common, WorkDir, parse_size, progress};
use firn_bench::report::{Limit, Report, Sample};

const HOSTS: u8 = 4;
/// The one that is lost.
const LOST: usize = 2;
const FILES: u64 = 4;
const WAIT_MAX: Duration = Duration::from_secs(120);

const BARE: &str = "bare sendfile";
const READY: &str = "partner copy";
const SEALED: &str = "partner copy, --encrypt yes";
const BACKING: &str = "from the backing";
const MEMORY: &str = "from memory";

/// Keeps checkpoints in the memory of a partner host, and restarts from there.
///
/// Network namespaces of this machine stand for the hosts; a bridge joins them, so all share its processors. Ready: the
/// time from the last close of a checkpoint until its partner has it (`firn wait --until partnered`), beside a
/// program that sends the same bytes of tmpfs files by sendfile(2) to one that writes them, over the same link.
/// Restart: a job of four hosts loses one with its memory; the other three read their files from their own memory and
/// a new host takes those of the lost one from its partner, beside four hosts with nothing in memory over a backing
/// that is the model of a disk of 2010 (80 MB/s); each byte is compared. Goal: ready within 1.2 of the bare
/// transfer. Needs root, ip and tc.
#[derive(Clone, Debug, clap::Args)]
pub struct PartnerArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the checkpoint of one host, in 4 files (default: 256M, quick 16M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Rates of the links, as tc(8) writes them.
    #[arg(long, value_name = "RATE", value_delimiter = ',', default_values = ["1gbit", "5gbit"])]
    rates: Vec<String>,
    /// Only this part.
    #[arg(long, value_enum)]
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// How soon a copy is ready.
    Ready,
    /// A restart after the loss of a host.
    Restart,
}

/// Hosts and what they share.
struct Site<'a> {
    hosts: &'a [NetworkHost],
    /// A program of its own for each, with arenas of its own.
    firns: Vec<Firn>,
    /// What the backing's server keeps in memory, and its mounts: one for each host, and for four more.
    source: PathBuf,
    top: PathBuf,
    work: &'a WorkDir,
    /// A checkpoint as files on tmpfs.
    plain: PathBuf,
    memory: PathBuf,
    bytes: u64,
}

/// A host with its mount and its agent.
struct Node<'a> {
    agent: Agent,
    mount: Mount<'a>,
}

/// `firn run`, which mounts for itself. It ends with the value, and then its mount goes.
struct Job {
    program: Ended,
    _unmount: Guard,
}

impl PartnerArgs {
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let mut guards: Vec<Guard> = Vec::new();
        let network = Network::create(HOSTS, &mut guards)?;
        let site = self.prepare(&firn, &work, network.hosts())?;
        let server = Server::Clients {
            source: site.source.clone(),
            model: Model::CachedDisk,
            divisor: 1,
            clients: 2 * u32::from(HOSTS),
        };
        let model = Mounted::start(&server, &site.top)?;
        let mut report = Report::new("partner");
        report.note(format!(
            "{} a host in {FILES} files; network namespaces on one machine, joined by a bridge; backing: a MODEL of a SATA disk of 2010 \
             (8.5 ms a seek, 80 MB/s, 256 MiB of write-back cache), which all hosts share",
            size_text(site.bytes)
        ));
        if self.part != Some(Part::Restart) {
            for rate in &self.rates {
                network.limit(Some(rate))?;
                let measured = self.measure_ready(&site, rate, &mut report);
                network.limit(None)?;
                measured?;
            }
        }
        if self.part != Some(Part::Ready) {
            self.measure_restart(&site, &mut report)?;
        }
        drop(model);
        drop(site);
        drop(guards);
        Ok(report)
    }

    fn prepare<'a>(
        &self,
        firn: &Firn,
        work: &'a WorkDir,
        hosts: &'a [NetworkHost],
    ) -> anyhow::Result<Site<'a>> {
        let memory = firn.memory_dir()?;
        let bytes = self
            .size
            .unwrap_or(self.common.choose(256 << 20, 16 << 20))
            .next_multiple_of(FILES << 20);
        let site = Site {
            hosts,
            firns: (0..2 * HOSTS)
                .map(|at| firn.on_host(&name(at.into())))
                .collect(),
            source: memory.join("model"),
            top: work.subdir("model")?,
            work,
            plain: memory.join("plain"),
            memory,
            bytes,
        };
        for dir in [&site.source, &site.plain] {
            std::fs::create_dir_all(dir)?;
        }
        for at in 0..2 * u32::from(HOSTS) {
            std::fs::create_dir_all(client_point(&site.top, at))?;
        }
        for file in 0..FILES {
            let data = noise(file, (bytes / FILES) as usize);
            std::fs::write(site.plain.join(format!("file{file}")), &data)?;
        }
        Ok(site)
    }

    fn measure_ready(
        &self,
        site: &Site<'_>,
        rate: &str,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let bar = progress(u64::from(self.common.repeats()), rate);
        let mut samples = vec![Vec::new(); 3];
        for _ in 0..self.common.repeats() {
            samples[0].push(seconds(site.send_bare()?));
            samples[1].push(seconds(site.copy_to_partner("auto")?));
            samples[2].push(seconds(site.copy_to_partner("yes")?));
            bar.inc(1);
        }
        bar.finish_and_clear();
        let names = [BARE, READY, SEALED].map(str::to_owned);
        report.add(
            format!("ready after the last close, links of {rate}"),
            names.into_iter().zip(samples).collect(),
        );
        let case = report.cases.last().expect("it was added");
        let ratio = case.ratio(READY, BARE, "time");
        report.judge(
            format!("partner copy ready to bare sendfile, {rate}"),
            Limit::Most(1.2),
            ratio.as_slice(),
        );
        Ok(())
    }

    fn measure_restart(&self, site: &Site<'_>, report: &mut Report) -> anyhow::Result<()> {
        let bar = progress(u64::from(self.common.repeats()), "restart");
        let mut samples = vec![Vec::new(); 2];
        for round in 0..self.common.repeats() {
            let step = format!("step_{round}");
            samples[1].push(seconds(site.restart_from_memory(&step)?));
            samples[0].push(seconds(site.restart_from_backing(&step)?));
            std::fs::remove_dir_all(site.source.join(&step))?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        let names = [BACKING, MEMORY].map(str::to_owned);
        report.add(
            format!("restart of a job of {HOSTS} hosts that lost one, links without a limit"),
            names.into_iter().zip(samples).collect(),
        );
        Ok(())
    }
}

impl Site<'_> {
    fn backing(&self, at: usize) -> PathBuf {
        client_point(&self.top, at as u32)
    }

    fn options(&self, at: usize) -> String {
        let arena = 2 * self.bytes + (64 << 20);
        let host = name(at);
        format!("drain=demand,close=held,partner=next,host={host},arena-size={arena}")
    }

    fn mount(&self, at: usize) -> anyhow::Result<Mount<'_>> {
        let point = self.work.subdir(&format!("mnt{at}"))?;
        self.firns[at].mount(&self.backing(at), &point, &self.options(at))
    }

    fn start(&self, at: usize, encrypt: &str) -> anyhow::Result<Node<'_>> {
        let mount = self.mount(at)?;
        mount.wait_populated()?;
        let host = &self.hosts[at];
        let mut command = self.firns[at].command_by(|program| host.namespace.command(program));
        command
            .args(["agent", "--encrypt", encrypt, "--listen"])
            .arg(format!("{}:0", host.address))
            // One host may be the partner of all the others.
            .args(["--partner-size", &(8 * self.bytes).to_string()])
            .arg(mount.path());
        let record = self.source.join(format!(".firn/agent-{}", name(at)));
        let agent = Agent::start(command, &record)?;
        Ok(Node { agent, mount })
    }

    /// Starts `hosts` hosts, each with its partner.
    fn start_all(&self, hosts: u8, encrypt: &str) -> anyhow::Result<Vec<Node<'_>>> {
        let nodes = (0..hosts.into()).map(|at| self.start(at, encrypt));
        let nodes = nodes.collect::<anyhow::Result<Vec<_>>>()?;
        for (at, node) in nodes.iter().enumerate() {
            let path = node.mount.path().join(format!("first{at}"));
            std::fs::write(&path, b"first")?;
            node.mount.wait_until_level("partnered", &path)?;
            std::fs::remove_file(&path)?;
        }
        nodes.iter().try_for_each(Node::wait_for_empty_shelf)?;
        Ok(nodes)
    }

    fn send_bare(&self) -> anyhow::Result<f64> {
        let program = std::env::current_exe()?;
        let program = program.to_string_lossy();
        let [source, partner] = [0, 1].map(|at| &self.hosts[at]);
        let transfer = network::send_bare(
            source.namespace.command(&program),
            partner.namespace.command(&program),
            &source.address,
            &self.plain,
            &self.memory.join("copy"),
        )?;
        Ok(transfer.elapsed_s)
    }

    /// From the last close until the partner has all.
    fn copy_to_partner(&self, encrypt: &str) -> anyhow::Result<f64> {
        let nodes = self.start_all(2, encrypt)?;
        let mount = &nodes[0].mount;
        let step = mount.path().join("step_1");
        std::fs::create_dir(&step)?;
        for file in 0..FILES {
            let file = format!("file{file}");
            std::fs::copy(self.plain.join(&file), step.join(&file))?;
        }
        let closed = Instant::now();
        mount.wait_until_level("partnered", &step)?;
        let elapsed_s = closed.elapsed().as_secs_f64();
        // While both are there: the copy of a mount that ended would stay.
        std::fs::remove_dir_all(&step)?;
        nodes[1].wait_for_empty_shelf()?;
        Ok(elapsed_s)
    }

    /// Each host has its own part of a checkpoint; one is lost with its memory.
    fn restart_from_memory(&self, step: &str) -> anyhow::Result<f64> {
        let mut nodes = self.start_all(HOSTS, "auto")?;
        for (at, node) in nodes.iter().enumerate() {
            let dir = node.mount.path().join(step).join(name(at));
            std::fs::create_dir_all(&dir)?;
            for file in 0..FILES {
                let file = format!("file{file}");
                std::fs::copy(self.plain.join(&file), dir.join(&file))?;
            }
        }
        for node in &nodes {
            node.mount
                .wait_until_level("partnered", node.mount.path())?;
        }
        self.check_nothing_drained(step)?;
        let Node { agent, mount } = nodes.remove(LOST);
        drop(agent);
        mount.lose()?;
        let begun = Instant::now();
        let done = self.memory.join("done");
        let mut new_host = self.restart_lost(step, &done)?;
        let mut readers = Vec::new();
        for (at, node) in (0..HOSTS.into()).filter(|at| *at != LOST).zip(&nodes) {
            readers.extend(self.compare(&node.mount.path().join(step).join(name(at)))?);
        }
        wait_all(readers)?;
        wait_until("the new host has read its files", || {
            if let Some(status) = new_host.program.0.try_wait()?
                && !done.exists()
            {
                bail!("`firn run --restart` failed: {status}");
            }
            Ok(done.exists())
        })?;
        let elapsed_s = begun.elapsed().as_secs_f64();
        std::fs::remove_file(&done)?;
        // It drains what it has, for the restart from the backing.
        let status = new_host.program.0.wait()?;
        if !status.success() {
            bail!("`firn run --restart` failed: {status}");
        }
        for Node { agent, mount } in nodes {
            mount.wait_durable(mount.path())?;
            let shelf = shelf_of(&mount)?;
            drop((agent, mount));
            if shelf.exists() {
                std::fs::remove_dir_all(shelf)?;
            }
        }
        Ok(elapsed_s)
    }

    /// A host in place of the lost one, with its network: its job compares what it finds, and says so in `done`.
    fn restart_lost(&self, step: &str, done: &Path) -> anyhow::Result<Job> {
        let at = LOST + usize::from(HOSTS);
        let host = &self.hosts[LOST];
        let prefix = self.work.subdir(&format!("mnt{at}"))?;
        let _unmount = expect(Leftover::Mount(prefix.clone()));
        let script = "for f in \"$0\"/*; do cmp \"$f\" \"$FIRN_PREFIX/$1/${f##*/}\" || exit 1; done; : > \"$2\"";
        let mut run = self.firns[at].command_by(|program| host.namespace.command(program));
        run.args(["run", "--no-preload", "--restart", &name(LOST)])
            .args(["-o", &self.options(at), "--backing"])
            .arg(self.backing(at))
            .arg("--prefix")
            .arg(&prefix)
            .args(["--", "sh", "-c", script])
            .arg(&self.plain)
            .arg(Path::new(step).join(name(LOST)))
            .arg(done)
            .stdin(Stdio::null());
        let child = run.spawn().context("cannot start `firn run`")?;
        Ok(Job {
            program: Ended(child),
            _unmount,
        })
    }

    /// Four hosts with nothing in memory.
    fn restart_from_backing(&self, step: &str) -> anyhow::Result<f64> {
        let begun = Instant::now();
        let mut mounts = Vec::new();
        let mut readers = Vec::new();
        for part in 0..usize::from(HOSTS) {
            let mount = self.mount(part + usize::from(HOSTS))?;
            readers.extend(self.compare(&mount.path().join(step).join(name(part)))?);
            mounts.push(mount);
        }
        wait_all(readers)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Programs that read each byte and compare it.
    fn compare(&self, dir: &Path) -> anyhow::Result<Vec<Ended>> {
        let compare = |file: u64| {
            let file = format!("file{file}");
            let mut cmp = Command::new("cmp");
            cmp.arg(self.plain.join(&file)).arg(dir.join(&file));
            let child = cmp.stdin(Stdio::null()).spawn().context("cannot run cmp")?;
            Ok(Ended(child))
        };
        (0..FILES).map(compare).collect()
    }

    fn check_nothing_drained(&self, step: &str) -> anyhow::Result<()> {
        for at in 0..usize::from(HOSTS) {
            for file in 0..FILES {
                let path = self
                    .source
                    .join(step)
                    .join(name(at))
                    .join(format!("file{file}"));
                if path.metadata().is_ok_and(|found| found.len() > 0) {
                    bail!("{} was drained: it is not in memory alone", path.display());
                }
            }
        }
        Ok(())
    }
}

impl Node<'_> {
    /// Waits until it has no copies.
    fn wait_for_empty_shelf(&self) -> anyhow::Result<()> {
        let shelf = shelf_of(&self.mount)?;
        wait_until("the copies are gone", || Ok(!shelf.exists()))
    }
}

/// Where a host has the copies of others.
fn shelf_of(mount: &Mount<'_>) -> anyhow::Result<PathBuf> {
    Ok(mount.arena()?.with_extension("partner"))
}

fn name(at: usize) -> String {
    format!("n{at}")
}

fn seconds(elapsed_s: f64) -> Sample {
    vec![("time", "s", elapsed_s)]
}

fn wait_all(programs: Vec<Ended>) -> anyhow::Result<()> {
    for mut program in programs {
        let status = program.0.wait()?;
        if !status.success() {
            bail!("a file is not what it was: cmp ended with {status}");
        }
    }
    Ok(())
}

fn wait_until(what: &str, mut holds: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !holds()? {
        if begun.elapsed() > WAIT_MAX {
            bail!("gave up waiting until {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
