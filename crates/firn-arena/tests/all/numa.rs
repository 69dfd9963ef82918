//! Tests that slabs come from the memory nearest to their writers. The topologies are files, not those of this machine.

use std::path::Path;

use firn_arena::{Arena, Identity, Lease, Topology};
use firn_format::geometry::Geometry;
use firn_format::slab::Class;

const CHUNK: u64 = 1 << 20;

/// Returns the topology of NUMA nodes with one CPU each, and these distances.
fn topology(distances: &[&[u32]]) -> Topology {
    let root = tempfile::tempdir().expect("a directory");
    let write =
        |name: &str, text: String| std::fs::write(root.path().join(name), text).expect("write");
    write("online", format!("0-{}\n", distances.len() - 1));
    for (numa_node, row) in distances.iter().enumerate() {
        std::fs::create_dir(root.path().join(format!("node{numa_node}"))).expect("mkdir");
        write(
            &format!("node{numa_node}/cpulist"),
            format!("{numa_node}\n"),
        );
        let row: Vec<String> = row.iter().map(u32::to_string).collect();
        write(&format!("node{numa_node}/distance"), row.join(" "));
    }
    Topology::read(root.path())
}

fn identity() -> Identity {
    Identity {
        backing: "/nowhere".into(),
        dev: 1,
        ino: 1,
    }
}

fn create(path: &Path, chunks: u64, topology: &Topology) -> Arena {
    let geometry = Geometry::with_spill(chunks * CHUNK, CHUNK, 0).expect("a geometry");
    Arena::create_on(path, geometry, &identity(), Path::new(""), topology).expect("an arena")
}

/// Returns the NUMA node whose part of the arena has the leased slab.
fn numa_node(arena: &Arena, lease: &Lease, numa_nodes: u32) -> u32 {
    let Some(firn_format::home::Home::Memory(slot)) = arena.home(lease.slab().chunk) else {
        panic!("a leased chunk is in memory");
    };
    slot / (arena.geometry().chunk_count / numa_nodes)
}

/// Leases whole chunks for a writer on `cpu` until none is free. Returns the NUMA node of each, in order.
fn lease_all_near(arena: &Arena, cpu: u32, numa_nodes: u32) -> (Vec<u32>, Vec<Lease>) {
    let leases: Vec<Lease> =
        std::iter::from_fn(|| arena.lease_slab_near(Class::Whole, Some(cpu))).collect();
    (
        leases
            .iter()
            .map(|lease| numa_node(arena, lease, numa_nodes))
            .collect(),
        leases,
    )
}

#[test]
fn a_writer_of_two_nodes_fills_its_own_first() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let topology = topology(&[&[10, 21], &[21, 10]]);
    for cpu in [0, 1] {
        let arena = create(&dir.path().join(format!("arena{cpu}")), 6, &topology);
        let (numa_nodes, leases) = lease_all_near(&arena, cpu, 2);
        assert_eq!(numa_nodes, [cpu, cpu, cpu, 1 - cpu, 1 - cpu, 1 - cpu]);
        let figures = arena.numa_node_figures();
        assert_eq!(
            figures.iter().map(|n| (n.id, n.bytes)).collect::<Vec<_>>(),
            [(0, 3 * CHUNK), (1, 3 * CHUNK)]
        );
        assert!(
            figures
                .iter()
                .all(|numa_node| numa_node.used_bytes == numa_node.bytes)
        );
        assert_eq!(figures[cpu as usize].foreign_slabs, 0);
        assert_eq!(figures[1 - cpu as usize].foreign_slabs, 3);
        leases.into_iter().for_each(|lease| arena.seal_slab(lease));
        assert!(
            arena
                .numa_node_figures()
                .iter()
                .all(|numa_node| numa_node.used_bytes == 0)
        );
        // The released slabs are leased again, in the same order.
        let (again, leases) = lease_all_near(&arena, cpu, 2);
        assert_eq!(again, numa_nodes);
        leases.into_iter().for_each(|lease| arena.seal_slab(lease));
    }
}

#[test]
fn four_nodes_are_used_by_distance_and_not_by_number() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let topology = topology(&[
        &[10, 32, 12, 21],
        &[32, 10, 21, 12],
        &[12, 40, 10, 32],
        &[30, 20, 11, 10],
    ]);
    let orders = [[0, 2, 3, 1], [1, 3, 2, 0], [2, 0, 3, 1], [3, 2, 1, 0]];
    for (cpu, order) in orders.into_iter().enumerate() {
        let arena = create(&dir.path().join(format!("arena{cpu}")), 8, &topology);
        let (numa_nodes, leases) = lease_all_near(&arena, cpu as u32, 4);
        assert_eq!(
            numa_nodes,
            order
                .iter()
                .flat_map(|&numa_node| [numa_node, numa_node])
                .collect::<Vec<_>>()
        );
        leases.into_iter().for_each(|lease| arena.seal_slab(lease));
    }
}

#[test]
fn a_far_slab_of_a_cut_chunk_waits_until_there_is_nothing_nearer() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let arena = create(
        &dir.path().join("arena"),
        4,
        &topology(&[&[10, 21], &[21, 10]]),
    );
    let first = arena.lease_slab_near(Class::Small, Some(1)).expect("room");
    let second = arena.lease_slab_near(Class::Small, Some(0)).expect("room");
    assert_eq!(
        (numa_node(&arena, &first, 2), numa_node(&arena, &second, 2)),
        (1, 0)
    );
    // Leases the rest of NUMA node 0 in whole chunks. The next slab then comes from the divided chunk of NUMA node 1.
    let whole = arena.lease_slab_near(Class::Whole, Some(0)).expect("room");
    assert_eq!(numa_node(&arena, &whole, 2), 0);
    let mut leases = vec![first, second, whole];
    let small = CHUNK / Class::Small.slab_bytes(CHUNK);
    for _ in 1..small {
        let lease = arena.lease_slab_near(Class::Small, Some(0)).expect("room");
        assert_eq!(numa_node(&arena, &lease, 2), 0);
        leases.push(lease);
    }
    let far = arena.lease_slab_near(Class::Small, Some(0)).expect("room");
    assert_eq!(
        (numa_node(&arena, &far, 2), far.slab().chunk),
        (1, leases[0].slab().chunk)
    );
    leases.push(far);
    assert_eq!(arena.numa_node_figures()[1].foreign_slabs, 1);
    leases.into_iter().for_each(|lease| arena.seal_slab(lease));
}

#[test]
fn an_arena_keeps_its_parts_over_an_attach() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = dir.path().join("arena");
    let topology = topology(&[&[10, 21], &[21, 10]]);
    let arena = create(&path, 4, &topology);
    let mut lease = arena.lease_slab_near(Class::Whole, Some(1)).expect("room");
    let reserved = lease.reserve(1, 0, 100).expect("room");
    arena.fill_slab(lease.slab(), reserved.position, &[7; 100]);
    let sequence = arena.next_sequence();
    arena.publish_piece(
        &mut lease,
        reserved,
        firn_arena::NewPiece {
            file_id: 1,
            offset: 0,
            sequence,
            modified: 0,
        },
    );
    drop(arena);
    let (arena, stored, damage) = Arena::attach_on(&path, &topology).expect("attach");
    assert!(damage.is_empty());
    arena.keep_piece(stored[0].record, 100);
    arena.free_unkept_slabs(&stored);
    assert_eq!(arena.numa_node_figures()[1].used_bytes, CHUNK);
    assert_eq!(lease_all_near(&arena, 1, 2).0, [1, 0, 0]);
}
