//! The objects that the kernel knows, and the names that lead to them.
//!
//! Invariants
//! * One [`Node`] for each object of the backing, whatever its number of names: hard links share it.
//! * A node's names hold its parents, so the path of a node with pending data can always be told,
//!   also when the kernel has forgotten the directories above.
//! * A node number is the backing's inode number where that is possible, so that programs see the
//!   numbers that they see in the backing.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use firn_backing::{Attr, Backing, Kind};
use parking_lot::Mutex;

use crate::{NodeId, ROOT};

/// Identity of an object in the backing: device and inode.
pub(crate) type Key = (u64, u64);

/// First number for objects whose inode number cannot serve: above any inode number met in practice.
const SYNTHETIC: u64 = 1 << 62;

/// One object.
pub(crate) struct Node<B: Backing> {
    pub id: NodeId,
    pub key: Key,
    pub kind: Kind,
    pub btime: Option<firn_backing::Time>,
    pub object: B::Node,
    /// Known names: (directory, name).
    names: Mutex<Vec<(Arc<Node<B>>, OsString)>>,
    /// A name was made or changed and not synced since.
    pub name_unsynced: AtomicBool,
    /// Data was drained and not synced since.
    pub data_unsynced: AtomicBool,
    /// Data was synced, and nothing has changed since.
    pub durable: AtomicBool,
}

impl<B: Backing> Node<B> {
    pub(crate) fn add_name(&self, parent: &Arc<Self>, name: &OsStr) {
        let mut names = self.names.lock();
        if self.kind == Kind::Dir {
            names.clear();
        }
        if !names.iter().any(|(p, n)| p.id == parent.id && n == name) {
            names.push((Arc::clone(parent), name.to_owned()));
        }
    }

    pub(crate) fn remove_name(&self, parent: NodeId, name: &OsStr) {
        self.names.lock().retain(|(p, n)| p.id != parent || n != name);
    }

    pub(crate) fn parents(&self) -> Vec<Arc<Self>> {
        self.names.lock().iter().map(|(p, _)| Arc::clone(p)).collect()
    }

    /// Every known path, relative to the root.
    pub(crate) fn paths(&self) -> Vec<Vec<u8>> {
        if self.id == ROOT {
            return vec![Vec::new()];
        }
        let names = self.names.lock().clone();
        names
            .iter()
            .filter_map(|(parent, name)| {
                let mut path = parent.paths().into_iter().next()?;
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(name.as_bytes());
                Some(path)
            })
            .collect()
    }
}

struct Known<B: Backing> {
    node: Arc<Node<B>>,
    lookups: u64,
}

struct Tables<B: Backing> {
    by_id: HashMap<NodeId, Known<B>>,
    by_key: HashMap<Key, Weak<Node<B>>>,
    children: HashMap<(NodeId, OsString), Weak<Node<B>>>,
    next_synthetic: u64,
}

/// All nodes.
pub(crate) struct Names<B: Backing> {
    root: Arc<Node<B>>,
    tables: Mutex<Tables<B>>,
    /// An earlier firnd may have made names that nobody synced: the first sync of each file syncs
    /// its names too.
    names_unsynced: bool,
}

impl<B: Backing> Names<B> {
    pub(crate) fn new(object: B::Node, attr: &Attr, names_unsynced: bool) -> Self {
        let root = Arc::new(new_node(ROOT, object, attr, false));
        let mut by_id = HashMap::new();
        by_id.insert(ROOT, Known { node: Arc::clone(&root), lookups: 1 });
        let by_key = HashMap::from([(root.key, Arc::downgrade(&root))]);
        let tables = Tables { by_id, by_key, children: HashMap::new(), next_synthetic: SYNTHETIC };
        Self { root, tables: Mutex::new(tables), names_unsynced }
    }

    pub(crate) fn root(&self) -> &Arc<Node<B>> {
        &self.root
    }

    pub(crate) fn get(&self, id: NodeId) -> Option<Arc<Node<B>>> {
        self.tables.lock().by_id.get(&id).map(|known| Arc::clone(&known.node))
    }

    /// The child, if the kernel or the engine knows it.
    pub(crate) fn child(&self, parent: NodeId, name: &OsStr) -> Option<Arc<Node<B>>> {
        self.tables.lock().children.get(&(parent, name.to_owned()))?.upgrade()
    }

    /// The node of an object that was found as `name` in `parent`; `lookups` more references by the
    /// kernel.
    pub(crate) fn register(
        &self,
        object: B::Node,
        attr: &Attr,
        parent: &Arc<Node<B>>,
        name: &OsStr,
        lookups: u64,
    ) -> Arc<Node<B>> {
        let mut guard = self.tables.lock();
        let tables = &mut *guard;
        let key = (attr.dev, attr.ino);
        let node = match tables.by_key.get(&key).and_then(Weak::upgrade) {
            // The same number and kind is the same object: we hold it, so the number is not reused.
            Some(node) if node.kind == attr.kind => node,
            _ => {
                let direct = NodeId(attr.ino);
                let usable = attr.dev == self.root.key.0 && attr.ino > 1 && attr.ino < SYNTHETIC;
                let id = if usable && !tables.by_id.contains_key(&direct) {
                    direct
                } else {
                    tables.next_synthetic += 1;
                    NodeId(tables.next_synthetic)
                };
                let node = Arc::new(new_node(id, object, attr, self.names_unsynced));
                tables.by_key.insert(key, Arc::downgrade(&node));
                node
            }
        };
        if node.id != ROOT {
            node.add_name(parent, name);
            tables.children.insert((parent.id, name.to_owned()), Arc::downgrade(&node));
        }
        if lookups > 0 {
            let known =
                tables.by_id.entry(node.id).or_insert_with(|| Known { node: Arc::clone(&node), lookups: 0 });
            known.lookups += lookups;
        }
        node
    }

    /// The kernel drops `count` references.
    pub(crate) fn forget(&self, id: NodeId, count: u64) {
        let mut tables = self.tables.lock();
        let Some(known) = tables.by_id.get_mut(&id) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups > 0 || id == ROOT {
            return;
        }
        let node = tables.by_id.remove(&id).expect("just seen").node;
        // Files with pending data hold the node; else this is the last reference.
        if Arc::strong_count(&node) == 1 {
            tables.by_key.remove(&node.key);
            for (parent, name) in node.names.lock().iter() {
                tables.children.remove(&(parent.id, name.clone()));
            }
        }
        drop(tables);
    }

    /// A name is gone.
    pub(crate) fn unlinked(&self, parent: NodeId, name: &OsStr) {
        let gone = self.tables.lock().children.remove(&(parent, name.to_owned()));
        if let Some(node) = gone.and_then(|weak| weak.upgrade()) {
            node.remove_name(parent, name);
        }
    }

    /// A name moved over another, or the two changed places.
    pub(crate) fn renamed(&self, from: (&Arc<Node<B>>, &OsStr), to: (&Arc<Node<B>>, &OsStr), exchange: bool) {
        let mut tables = self.tables.lock();
        let (from_key, to_key) = ((from.0.id, from.1.to_owned()), (to.0.id, to.1.to_owned()));
        let moved = tables.children.remove(&from_key).and_then(|weak| weak.upgrade());
        let replaced = tables.children.remove(&to_key).and_then(|weak| weak.upgrade());
        if let Some(node) = &replaced {
            node.remove_name(to.0.id, to.1);
        }
        if let Some(node) = &moved {
            node.remove_name(from.0.id, from.1);
            node.add_name(to.0, to.1);
            node.name_unsynced.store(true, Ordering::Release);
            tables.children.insert(to_key, Arc::downgrade(node));
        }
        if exchange && let Some(node) = &replaced {
            node.add_name(from.0, from.1);
            node.name_unsynced.store(true, Ordering::Release);
            tables.children.insert(from_key, Arc::downgrade(node));
        }
    }
}

fn new_node<B: Backing>(id: NodeId, object: B::Node, attr: &Attr, name_unsynced: bool) -> Node<B> {
    Node {
        id,
        key: (attr.dev, attr.ino),
        kind: attr.kind,
        btime: attr.btime,
        object,
        names: Mutex::new(Vec::new()),
        name_unsynced: AtomicBool::new(name_unsynced),
        data_unsynced: AtomicBool::new(false),
        durable: AtomicBool::new(false),
    }
}
