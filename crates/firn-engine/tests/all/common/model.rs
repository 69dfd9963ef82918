//! The reference model: a tree of files whose contents are byte vectors.

use std::collections::BTreeMap;

/// Number of a file object.
pub type Object = usize;

/// Files and names as a plain file system would have them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Objects by path; without directories.
    pub names: BTreeMap<String, Object>,
    /// Contents by object.
    pub contents: BTreeMap<Object, Vec<u8>>,
    next: Object,
}

impl Model {
    pub fn create(&mut self, path: &str) -> Object {
        self.next += 1;
        self.contents.insert(self.next, Vec::new());
        self.names.insert(path.into(), self.next);
        self.next
    }
    pub fn write(&mut self, object: Object, offset: u64, data: &[u8]) {
        let contents = self.contents.get_mut(&object).expect("an object");
        let end = offset as usize + data.len();
        if contents.len() < end {
            contents.resize(end, 0);
        }
        contents[offset as usize..end].copy_from_slice(data);
    }
    pub fn truncate(&mut self, object: Object, size: u64) {
        self.contents
            .get_mut(&object)
            .expect("an object")
            .resize(size as usize, 0);
    }
    /// Moves one name, or all names below a directory.
    pub fn rename(&mut self, from: &str, to: &str) {
        if self.names.contains_key(from) && self.names.get(from) == self.names.get(to) {
            return;
        }
        let below = format!("{from}/");
        let moved: Vec<String> = self
            .names
            .keys()
            .filter(|p| *p == from || p.starts_with(&below))
            .cloned()
            .collect();
        for path in moved {
            let object = self.names.remove(&path).expect("just listed");
            self.names
                .insert(format!("{to}{}", &path[from.len()..]), object);
        }
    }
    pub fn exchange(&mut self, a: &str, b: &str) {
        let x = self.names[a];
        let y = self.names[b];
        self.names.insert(a.into(), y);
        self.names.insert(b.into(), x);
    }
    /// Returns the contents by path.
    pub fn tree(&self) -> BTreeMap<String, Vec<u8>> {
        self.names
            .iter()
            .map(|(path, object)| (path.clone(), self.contents[object].clone()))
            .collect()
    }
}

/// A write that was not acknowledged when the world stopped: each of its bytes may be there or not.
#[derive(Clone, Debug)]
pub struct Unacknowledged {
    pub object: Object,
    pub offset: u64,
    pub data: Vec<u8>,
}

/// Returns whether `found` equals `before` with any subset of the write's bytes applied.
pub fn partly(before: &[u8], found: &[u8], offset: u64, data: &[u8]) -> bool {
    let end = before.len().max(offset as usize + data.len());
    found.len() >= before.len()
        && found.len() <= end
        && found.iter().enumerate().all(|(i, byte)| {
            let old = before.get(i).copied().unwrap_or(0);
            let new = (i as u64)
                .checked_sub(offset)
                .and_then(|at| data.get(at as usize));
            *byte == old || new == Some(byte)
        })
}
