//! Network namespaces of the kernel, in which tests and benchmarks simulate other hosts on one machine. Root only.
//!
//! A [`Namespace`] has its own network, and a [`Link`] connects it with the network of this process. A [`Network`] has
//! several namespaces, joined by a bridge. All devices and namespaces are removed at the end by guards.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cleanup::{Guard, Leftover, expect};
use crate::run;

/// A network namespace, named after this process.
pub struct Namespace {
    name: String,
    /// Number for the names of devices and for addresses. It differs from the others of this process, and most likely
    /// from those of other processes. If not, the second device cannot be made.
    number: u32,
}

impl Namespace {
    /// Makes a namespace with a loopback device. `guards` gets the guard that removes the namespace and its processes.
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

    /// Connects the namespace with that of this process by a pair of virtual devices (veth). `guards` gets the guard
    /// that removes the pair.
    pub fn connect(&self, guards: &mut Vec<Guard>) -> anyhow::Result<Link> {
        let own_device = device_name(self.number);
        let peer_device = format!("{own_device}p");
        // Two namespaces should not have the same subnet. A link has one of those from 10.64.0 to 10.127.255.
        let (high, low) = (self.number / 256 % 64, self.number % 256);
        let link = Link {
            own_device: own_device.clone(),
            peer_device: peer_device.clone(),
            subnet: format!("10.{}.{low}", 64 + high),
        };
        guards.push(expect(Leftover::Link(own_device.clone())));
        let name = &self.name;
        ip(&format!(
            "link add {own_device} type veth peer name {peer_device} netns {name}"
        ))?;
        ip(&format!("addr add {}/24 dev {own_device}", link.address(1)))?;
        ip(&format!("link set {own_device} up"))?;
        self.ip(&format!("link set {peer_device} up"))?;
        Ok(link)
    }

    /// Gives the namespace another address of the link, and returns it. `number` is its last part, from 2 on.
    pub fn add_address(&self, link: &Link, number: u8) -> anyhow::Result<String> {
        let address = link.address(number);
        self.ip(&format!("addr add {address}/24 dev {}", link.peer_device))?;
        Ok(address)
    }

    /// Runs `ip ARGS` in the namespace.
    pub fn ip(&self, args: &str) -> anyhow::Result<()> {
        ip(&format!("-n {} {args}", self.name))
    }

    /// Returns a command that runs `program` with the network of the namespace and the mounts of this process.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name));
        command.arg(program);
        command
    }
}

/// A pair of virtual devices that connects a namespace with that of this process. The address of this process has the
/// number 1.
pub struct Link {
    /// Name of the device of this process.
    own_device: String,
    /// Name of the device in the namespace.
    peer_device: String,
    /// The first three numbers of the link's addresses.
    subnet: String,
}

impl Link {
    /// Limits the rate at which this process can send over the link. `rate` is in the form of tc(8); `None` ends the
    /// limit.
    pub fn limit(&self, rate: Option<&str>) -> anyhow::Result<()> {
        limit_device(&self.own_device, rate)
    }

    /// Returns the address of the link with this number.
    pub fn address(&self, number: u8) -> String {
        format!("{}.{number}", self.subnet)
    }

    /// Limits what can be sent to each of these addresses in the namespace, in bytes per second. Must be called only
    /// once.
    pub fn limit_to(&self, addresses: &[String], bytes_per_s: u64) -> anyhow::Result<()> {
        let device = &self.own_device;
        // Packets that match no class are not limited.
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

/// Returns the name of a virtual device in the namespace of this process, from the number of a [`Namespace`]. It is cut
/// to nine digits, because a name has at most 15 characters.
fn device_name(number: u32) -> String {
    format!("fb{}", number % 1_000_000_000)
}

/// Simulated hosts, each a network namespace, joined by a bridge in the namespace of this process.
pub struct Network {
    hosts: Vec<NetworkHost>,
}

/// A simulated host of a [`Network`].
pub struct NetworkHost {
    /// The namespace in which its programs run.
    pub namespace: Namespace,
    /// Its address.
    pub address: String,
    /// Name of its device at the bridge.
    port: String,
}

impl Network {
    /// Makes a network of at most 200 simulated hosts, which can reach only each other. `guards` gets the guards that
    /// remove the network.
    pub fn create(hosts: u8, guards: &mut Vec<Guard>) -> anyhow::Result<Self> {
        let mut network = Self { hosts: Vec::new() };
        let mut bridge = String::new();
        let mut subnet = String::new();
        for number in 1..=hosts {
            let namespace = Namespace::create(guards)?;
            if bridge.is_empty() {
                bridge = format!("fw{}", namespace.number % 1_000_000_000);
                // The first namespace gives the bridge its name. The bridge gets no address, so only these hosts can
                // reach each other through it.
                subnet = format!("10.63.{}", namespace.number % 256);
                guards.push(expect(Leftover::Link(bridge.clone())));
                ip(&format!("link add {bridge} type bridge"))?;
                ip(&format!("link set {bridge} up"))?;
            }
            network.add(namespace, &bridge, &subnet, number, guards)?;
        }
        Ok(network)
    }

    /// Connects a namespace with the bridge `bridge`, and adds it as the host with this number.
    fn add(
        &mut self,
        namespace: Namespace,
        bridge: &str,
        subnet: &str,
        number: u8,
        guards: &mut Vec<Guard>,
    ) -> anyhow::Result<()> {
        let port = device_name(namespace.number);
        let peer_device = format!("{port}p");
        guards.push(expect(Leftover::Link(port.clone())));
        let name = &namespace.name;
        ip(&format!(
            "link add {port} type veth peer name {peer_device} netns {name}"
        ))?;
        ip(&format!("link set {port} master {bridge}"))?;
        ip(&format!("link set {port} up"))?;
        let address = format!("{subnet}.{number}");
        namespace.ip(&format!("addr add {address}/24 dev {peer_device}"))?;
        namespace.ip(&format!("link set {peer_device} up"))?;
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

    /// Limits the rate at which each host can receive. `rate` is in the form of tc(8); `None` ends the limit.
    pub fn limit(&self, rate: Option<&str>) -> anyhow::Result<()> {
        let mut ports = self.hosts.iter().map(|host| &host.port);
        ports.try_for_each(|port| limit_device(port, rate))
    }
}

/// Limits the rate at which a device sends. `rate` is in the form of tc(8); `None` ends the limit.
fn limit_device(device: &str, rate: Option<&str>) -> anyhow::Result<()> {
    let line = match rate {
        Some(rate) => format!("qdisc add dev {device} root tbf rate {rate} burst 1mb latency 20ms"),
        None => format!("qdisc del dev {device} root"),
    };
    tc(&line)
}

/// Runs `tc ARGS` in the namespace of this process.
fn tc(args: &str) -> anyhow::Result<()> {
    run("tc", &args.split(' ').collect::<Vec<_>>()).map(drop)
}

/// Runs `ip ARGS` in the namespace of this process.
fn ip(args: &str) -> anyhow::Result<()> {
    run("ip", &args.split(' ').collect::<Vec<_>>()).map(drop)
}
