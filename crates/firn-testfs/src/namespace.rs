//! A network namespace of this run's own (root only), for servers on other hosts.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cleanup::{Guard, defer};

use crate::{run, run_quietly};

/// A network namespace, named after this process.
pub struct Namespace {
    name: String,
    /// Of this one among all that run on this machine, or nearly so.
    number: u32,
}

impl Namespace {
    /// Makes it, with its loopback up. `guards` gets what removes it, with all of its processes.
    pub fn create(guards: &mut Vec<Guard>) -> anyhow::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let pid = std::process::id();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("firn-{pid}-{count}");
        let removed = name.clone();
        guards.push(defer(move || {
            // Servers leave their process group and some survive the end of their connections. The namespace is this
            // run's own, so whatever is in it is too.
            end_all(&run("ip", &["netns", "pids", &removed]).unwrap_or_default());
            run_quietly("ip", &["netns", "del", &removed]);
        }));
        let number = pid.wrapping_mul(4).wrapping_add(count);
        let namespace = Self { name, number };
        ip(&format!("netns add {}", namespace.name))?;
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Connects it with this process's namespace. `guards` gets what cuts the link.
    pub fn connect(&self, guards: &mut Vec<Guard>) -> anyhow::Result<Link> {
        let here = format!("fb{}", self.number % 1_000_000_000);
        let there = format!("{here}p");
        let (high, low) = (self.number / 256 % 64, self.number % 256);
        let link = Link {
            here: here.clone(),
            there: there.clone(),
            subnet: format!("10.{}.{low}", 64 + high),
        };
        let cut = here.clone();
        guards.push(defer(move || run_quietly("ip", &["link", "del", &cut])));
        let name = &self.name;
        ip(&format!(
            "link add {here} type veth peer name {there} netns {name}"
        ))?;
        ip(&format!("addr add {}/24 dev {here}", link.address(1)))?;
        ip(&format!("link set {here} up"))?;
        self.ip(&format!("link set {there} up"))?;
        Ok(link)
    }

    /// Gives the namespace the address with this number, from 2 on.
    pub fn add_address(&self, link: &Link, number: u8) -> anyhow::Result<String> {
        let address = link.address(number);
        self.ip(&format!("addr add {address}/24 dev {}", link.there))?;
        Ok(address)
    }

    /// `ip ARGS` inside.
    pub fn ip(&self, args: &str) -> anyhow::Result<()> {
        ip(&format!("-n {} {args}", self.name))
    }

    /// Starts `program` with the namespace's network and this process's mounts.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name));
        command.arg(program);
        command
    }
}

/// What connects a namespace with that of this process, whose address has the number 1.
pub struct Link {
    /// The device outside.
    here: String,
    /// The device in the namespace.
    there: String,
    /// The first three numbers of its addresses.
    subnet: String,
}

impl Link {
    /// Lets no more out of this process's namespace than this rate of tc(8), or all again.
    pub fn limit(&self, rate: Option<&str>) -> anyhow::Result<()> {
        let here = &self.here;
        let line = match rate {
            Some(rate) => {
                format!("qdisc add dev {here} root tbf rate {rate} burst 1mb latency 20ms")
            }
            None => format!("qdisc del dev {here} root"),
        };
        tc(&line)
    }

    /// The address with this number.
    pub fn address(&self, number: u8) -> String {
        format!("{}.{number}", self.subnet)
    }

    /// Lets so many bytes a second go to each of these addresses inside, and no more. Once.
    pub fn limit_to(&self, addresses: &[String], bytes_per_s: u64) -> anyhow::Result<()> {
        let device = &self.here;
        // What is for no class is not limited.
        tc(&format!("qdisc add dev {device} root handle 1: htb"))?;
        for (number, address) in (1..).zip(addresses) {
            let bits = 8 * bytes_per_s;
            tc(&format!(
                "class add dev {device} parent 1: classid 1:{number} htb rate {bits}bit burst 64k quantum 60000"
            ))?;
            tc(&format!(
                "filter add dev {device} parent 1: protocol ip u32 match ip dst {address}/32 flowid 1:{number}"
            ))?;
        }
        Ok(())
    }
}

/// `tc ARGS` in this process's namespace.
fn tc(args: &str) -> anyhow::Result<()> {
    run("tc", &args.split(' ').collect::<Vec<_>>()).map(drop)
}

/// `ip ARGS` in this process's namespace.
fn ip(args: &str) -> anyhow::Result<()> {
    run("ip", &args.split(' ').collect::<Vec<_>>()).map(drop)
}

/// Ends the processes whose numbers stand in `pids`, one a line.
fn end_all(pids: &str) {
    use rustix::process::{Pid, Signal, kill_process};
    for pid in pids
        .lines()
        .filter_map(|line| Pid::from_raw(line.trim().parse().ok()?))
    {
        let _ = kill_process(pid, Signal::KILL);
    }
}
