//! The NUMA nodes of the machine: which CPUs are near which memory.
//!
//! The facts come from a directory laid out like /sys/devices/system/node (Documentation/ABI/stable/sysfs-devices-node
//! of the kernel): `online`, `has_memory`, `nodeN/cpulist` and `nodeN/distance`. If any of them cannot be read or is
//! not valid, the machine counts as one NUMA node.
//!
//! Only nodes with memory are kept. Each has two numbers: its *index*, from 0 without gaps, which firnd uses, and its
//! *id*, the kernel's number ([`Topology::id`]).
//!
//! Invariants
//! * There is at least one node.
//! * The order of each node names every node once, and the node itself first.

use std::path::Path;

/// Where the kernel describes its NUMA nodes.
pub const SYSFS_NODES: &str = "/sys/devices/system/node";

/// The NUMA nodes with memory, and which of them is nearest to each CPU. Nodes are numbered from 0 without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The kernel's number of each node.
    ids: Vec<u32>,
    /// The index of the nearest node to each CPU.
    node_by_cpu: Vec<u32>,
    /// For each node, the indexes of all nodes, the nearest first.
    nearest_first: Vec<Vec<u32>>,
}

impl Default for Topology {
    fn default() -> Self {
        Self::one()
    }
}

impl Topology {
    /// Returns a machine with one NUMA node: all memory is equally near.
    pub fn one() -> Self {
        Self {
            ids: vec![0],
            node_by_cpu: Vec::new(),
            nearest_first: vec![vec![0]],
        }
    }

    /// Reads the nodes from the files below `root`. Returns one node if they cannot be read or are not valid.
    pub fn read(root: &Path) -> Self {
        Self::try_read(root).unwrap_or_else(Self::one)
    }

    /// Reads the NUMA nodes and the CPUs near each from the directory `root`, which is laid out like
    /// /sys/devices/system/node. Returns `None` if a file that is needed cannot be read or is not valid.
    fn try_read(root: &Path) -> Option<Self> {
        let online_ids = parse_list(&read_file(root, "online")?)?;
        let memory_ids = match read_file(root, "has_memory") {
            Some(text) => parse_list(&text)?,
            None => online_ids.clone(),
        };
        if memory_ids.is_empty() {
            return None;
        }
        let mut nearest_first = Vec::new();
        for &id in &memory_ids {
            nearest_first.push(read_nearest_first(root, id, &online_ids, &memory_ids)?);
        }
        let mut node_by_cpu = Vec::new();
        for &id in &online_ids {
            // The CPUs of a node without memory count as those of the nearest node with memory.
            let nearest_nodes = read_nearest_first(root, id, &online_ids, &memory_ids)?;
            let nearest_node = *nearest_nodes.first()?;
            for cpu in parse_list(&read_file(root, &format!("node{id}/cpulist"))?)? {
                let cpu = cpu as usize;
                node_by_cpu.resize(node_by_cpu.len().max(cpu + 1), 0);
                node_by_cpu[cpu] = nearest_node;
            }
        }
        Some(Self::new(memory_ids, node_by_cpu, nearest_first))
    }

    /// Returns a topology of NUMA nodes, which are numbered by their position in `ids`, the kernel's numbers.
    /// `node_by_cpu` contains the nearest node of each CPU, and `nearest_first` contains for each node all nodes, the
    /// nearest first.
    fn new(ids: Vec<u32>, node_by_cpu: Vec<u32>, nearest_first: Vec<Vec<u32>>) -> Self {
        for (node, order) in nearest_first.iter().enumerate() {
            debug_assert_eq!(
                order.first(),
                Some(&(node as u32)),
                "it is nearest to itself"
            );
            debug_assert!(
                (0..ids.len() as u32).all(|other| order.contains(&other)),
                "order {order:?} of NUMA node {node} misses one"
            );
        }
        Self {
            ids,
            node_by_cpu,
            nearest_first,
        }
    }

    /// Returns the number of nodes.
    pub fn count(&self) -> usize {
        self.ids.len()
    }

    /// Returns the kernel's number of a node.
    pub fn id(&self, node: usize) -> u32 {
        self.ids[node]
    }

    /// Returns the node nearest to a CPU; the first node if the CPU is not listed.
    pub fn nearest_to_cpu(&self, cpu: u32) -> usize {
        self.node_by_cpu
            .get(cpu as usize)
            .map_or(0, |&node| node as usize)
    }

    /// Returns the node nearest to the CPU on which this thread runs now.
    pub fn nearest_to_this_thread(&self) -> usize {
        if self.ids.len() == 1 {
            return 0;
        }
        self.nearest_to_cpu(rustix::thread::sched_getcpu() as u32)
    }

    /// Returns all nodes, the nearest to `node` first.
    pub(crate) fn nodes_by_distance(&self, node: usize) -> &[u32] {
        &self.nearest_first[node]
    }
}

/// Reads a file below `root` as text. Returns `None` if it cannot be read.
fn read_file(root: &Path, name: &str) -> Option<String> {
    std::fs::read_to_string(root.join(name)).ok()
}

/// Returns the nodes with memory, the nearest to the NUMA node `id` first, as indexes in `memory_ids`. Reads the
/// distances from the kernel's file. Returns `None` if the file cannot be read or is not valid.
fn read_nearest_first(
    root: &Path,
    id: u32,
    online_ids: &[u32],
    memory_ids: &[u32],
) -> Option<Vec<u32>> {
    // The row has a distance to each online node, in the order of their numbers.
    let row: Vec<u32> = read_file(root, &format!("node{id}/distance"))?
        .split_ascii_whitespace()
        .map(|distance| distance.parse().ok())
        .collect::<Option<_>>()?;
    let mut distances = Vec::new();
    for other_id in memory_ids {
        let column = online_ids
            .iter()
            .position(|online_id| online_id == other_id)?;
        distances.push(*row.get(column)?);
    }
    let mut nearest_first: Vec<u32> = (0..memory_ids.len() as u32).collect();
    // A node is nearest to itself, whatever its row says. If two nodes are equally far, the lower index comes first.
    nearest_first.sort_by_key(|&index| {
        let is_other_node = memory_ids[index as usize] != id;
        (is_other_node, distances[index as usize])
    });
    Some(nearest_first)
}

/// Parses a list of numbers such as `0-3,8`. An empty text is an empty list. Returns `None` if the text is not valid or
/// has a number that no kernel uses.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    const NUMBER_MAX: u32 = 1 << 16;
    let mut numbers = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        // A single number is a range of one.
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: u32 = first.parse().ok()?;
        let last: u32 = last.parse().ok()?;
        if first > last || last >= NUMBER_MAX {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("below the root")).expect("mkdir");
            std::fs::write(path, text).expect("write");
        }
        root
    }

    #[test]
    fn orders_go_by_distance_and_a_numa_node_without_memory_uses_its_neighbour() {
        let root = files(&[
            ("online", "0-1,4-5\n"),
            ("has_memory", "0-1,5\n"),
            ("node0/cpulist", "0-1,8\n"),
            ("node1/cpulist", "2-3\n"),
            ("node4/cpulist", "4\n"),
            ("node5/cpulist", "\n"),
            ("node0/distance", "10 32 21 21\n"),
            ("node1/distance", "32 10 40 12\n"),
            ("node4/distance", "40 32 10 20\n"),
            ("node5/distance", "21 12 20 10\n"),
        ]);
        let topology = Topology::read(root.path());
        assert_eq!(
            (0..topology.count())
                .map(|n| topology.id(n))
                .collect::<Vec<_>>(),
            [0, 1, 5]
        );
        assert_eq!(topology.nodes_by_distance(0), [0, 2, 1]);
        assert_eq!(topology.nodes_by_distance(1), [1, 2, 0]);
        assert_eq!(topology.nodes_by_distance(2), [2, 1, 0]);
        assert_eq!(
            [0, 8, 2, 4, 99].map(|cpu| topology.nearest_to_cpu(cpu)),
            [0, 0, 1, 2, 0]
        );
    }

    #[test]
    fn what_cannot_be_read_is_one_numa_node() {
        let whole = [
            ("online", "0-1"),
            ("node0/cpulist", "0"),
            ("node1/cpulist", "1"),
        ];
        let rows = [("node0/distance", "10 20"), ("node1/distance", "20 10")];
        let all: Vec<_> = whole.into_iter().chain(rows).collect();
        assert_eq!(Topology::read(files(&all).path()).count(), 2);
        for damaged in [
            ("online", "1-0"),
            ("online", "x"),
            ("node1/distance", "20"),
            ("has_memory", "0-9"),
        ] {
            let root = files(&all);
            std::fs::write(root.path().join(damaged.0), damaged.1).expect("write");
            assert_eq!(Topology::read(root.path()), Topology::one(), "{damaged:?}");
        }
        assert_eq!(Topology::read(Path::new("/nonexistent")), Topology::one());
    }

    #[test]
    fn this_machine_has_memory_near_this_thread() {
        let topology = Topology::read(Path::new(SYSFS_NODES));
        assert!(topology.nearest_to_this_thread() < topology.count());
    }
}
