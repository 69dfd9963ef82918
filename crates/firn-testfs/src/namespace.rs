//! A network namespace of this run's own (root only), for servers on other hosts.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cleanup::{Guard, Leftover, expect};
use crate::run;

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
        guards.push(expect(Leftover::Namespace(name.clone())));
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
        guards.push(expect(Leftover::Link(here.clone())));
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
        limit_device(&self.here, rate)
    }

    /// The address with this number.
    pub fn address(&self, number: u8) -> String {
        format!("{}.{number}", self.subnet)
    }

    /// Limits the traffic to each of these addresses inside to `bytes_per_s` bytes a second. Call it once.
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

/// Hosts with networks of their own, joined by a switch in this process's namespace.
pub struct Network {
    hosts: Vec<NetworkHost>,
}

/// One of them.
pub struct NetworkHost {
    /// Its network.
    pub namespace: Namespace,
    /// Its address.
    pub address: String,
    /// The switch's end of its link.
    port: String,
}

impl Network {
    /// Makes it, of at most 200 hosts. `guards` gets what removes it.
    pub fn create(hosts: u8, guards: &mut Vec<Guard>) -> anyhow::Result<Self> {
        let mut network = Self { hosts: Vec::new() };
        let (mut switch, mut subnet) = (String::new(), String::new());
        for number in 1..=hosts {
            let namespace = Namespace::create(guards)?;
            if switch.is_empty() {
                switch = format!("fw{}", namespace.number % 1_000_000_000);
                // Only these hosts are reached through the switch.
                subnet = format!("10.63.{}", namespace.number % 256);
                guards.push(expect(Leftover::Link(switch.clone())));
                ip(&format!("link add {switch} type bridge"))?;
                ip(&format!("link set {switch} up"))?;
            }
            network.add(namespace, &switch, &subnet, number, guards)?;
        }
        Ok(network)
    }

    fn add(
        &mut self,
        namespace: Namespace,
        switch: &str,
        subnet: &str,
        number: u8,
        guards: &mut Vec<Guard>,
    ) -> anyhow::Result<()> {
        let port = format!("fb{}", namespace.number % 1_000_000_000);
        let there = format!("{port}p");
        guards.push(expect(Leftover::Link(port.clone())));
        let name = &namespace.name;
        ip(&format!(
            "link add {port} type veth peer name {there} netns {name}"
        ))?;
        ip(&format!("link set {port} master {switch}"))?;
        ip(&format!("link set {port} up"))?;
        let address = format!("{subnet}.{number}");
        namespace.ip(&format!("addr add {address}/24 dev {there}"))?;
        namespace.ip(&format!("link set {there} up"))?;
        self.hosts.push(NetworkHost {
            namespace,
            address,
            port,
        });
        Ok(())
    }

    /// The hosts.
    pub fn hosts(&self) -> &[NetworkHost] {
        &self.hosts
    }

    /// Lets no more reach each host than this rate of tc(8), or all again.
    pub fn limit(&self, rate: Option<&str>) -> anyhow::Result<()> {
        let mut ports = self.hosts.iter().map(|host| &host.port);
        ports.try_for_each(|port| limit_device(port, rate))
    }
}

/// Lets no more out of a device than this rate of tc(8), or all again.
fn limit_device(device: &str, rate: Option<&str>) -> anyhow::Result<()> {
    let line = match rate {
        Some(rate) => format!("qdisc add dev {device} root tbf rate {rate} burst 1mb latency 20ms"),
        None => format!("qdisc del dev {device} root"),
    };
    tc(&line)
}

/// `tc ARGS` in this process's namespace.
fn tc(args: &str) -> anyhow::Result<()> {
    run("tc", &args.split(' ').collect::<Vec<_>>()).map(drop)
}

/// `ip ARGS` in this process's namespace.
fn ip(args: &str) -> anyhow::Result<()> {
    run("ip", &args.split(' ').collect::<Vec<_>>()).map(drop)
}
