//! What programs and the backing of a mount with commit rules have after operations of a trace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use firn_rules::load_rules;
use firn_rules::trace::{RuleReaction, TraceLine, TracePlayer, TraceStep};

use crate::replay::content;

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A directory.
    Dir,
    /// A symbolic link, and its target.
    Link(String),
    /// A file, and its bytes.
    File(Vec<u8>),
}

/// All below a directory, by path.
pub type Files = BTreeMap<String, Node>;

fn is_at(path: &str, top: &str) -> bool {
    path == top
        || path
            .strip_prefix(top)
            .is_some_and(|rest| rest.starts_with('/'))
}

/// Makes `to` have at a top what `from` has there.
fn copy(from: &Files, to: &mut Files, top: &str) {
    to.retain(|path, _| !is_at(path, top));
    let there = from.iter().filter(|(path, _)| is_at(path, top));
    to.extend(there.map(|(path, node)| (path.clone(), node.clone())));
}

/// What programs and the backing have after operations of a trace.
pub struct Model {
    /// What the rules make of it.
    pub player: TracePlayer,
    seen: usize,
    /// What programs see.
    pub view: Files,
    /// What the backing has.
    pub backing: Files,
    /// Tops of scopes that are open.
    open: BTreeSet<String>,
    /// Commits so far.
    pub commits: usize,
}

impl Model {
    /// Nothing is there; `rules` are names of rules.
    pub fn new(rules: &str) -> Self {
        let rules = load_rules(rules, |_| unreachable!("no file")).expect("rules");
        Self {
            player: TracePlayer::new(Arc::new(rules)),
            seen: 0,
            view: Files::new(),
            backing: Files::new(),
            open: BTreeSet::new(),
            commits: 0,
        }
    }

    /// Makes an operation.
    pub fn play(&mut self, line: &TraceLine) {
        self.player.play(line);
        let new: Vec<RuleReaction> = self.player.reactions()[self.seen..].to_vec();
        self.seen = self.player.reactions().len();
        // What a begin comes after, and the begin, are before the operation.
        let begins = |one: &RuleReaction| one.what == "begin" || one.what == "join";
        let before = new.iter().rposition(begins).map_or(0, |index| index + 1);
        new[..before].iter().for_each(|one| self.take(one));
        self.change(line);
        new[before..].iter().for_each(|one| self.take(one));
    }

    fn take(&mut self, outcome: &RuleReaction) {
        for top in &outcome.paths {
            match outcome.what {
                "begin" | "join" => drop(self.open.insert(top.clone())),
                "commit" => copy(&self.view, &mut self.backing, top),
                "abort" => copy(&self.backing, &mut self.view, top),
                other => panic!("{other}"),
            }
            if matches!(outcome.what, "commit" | "abort") {
                self.open.remove(top);
            }
        }
        self.commits += usize::from(outcome.what == "commit");
    }

    fn set(&mut self, path: &str, node: Node) {
        self.view.insert(path.to_owned(), node.clone());
        if !self.open.iter().any(|top| is_at(path, top)) {
            self.backing.insert(path.to_owned(), node);
        }
    }

    fn remove(&mut self, path: &str) {
        self.view.retain(|found, _| !is_at(found, path));
        if !self.open.iter().any(|top| is_at(path, top)) {
            self.backing.retain(|found, _| !is_at(found, path));
        }
    }

    fn change(&mut self, line: &TraceLine) {
        match &line.step {
            TraceStep::Mkdir(path) => self.set(path, Node::Dir),
            TraceStep::Open(path) | TraceStep::Truncate(path) => {
                self.set(path, Node::File(Vec::new()))
            }
            TraceStep::Write(path, len) => self.set(path, Node::File(content(line.line, *len))),
            TraceStep::Symlink(target, path) => self.set(path, Node::Link(target.clone())),
            TraceStep::Unlink(path) | TraceStep::Rmdir(path) => self.remove(path),
            TraceStep::Rename(from, to) => {
                let moved: Files = self
                    .view
                    .iter()
                    .filter(|(path, _)| is_at(path, from))
                    .map(|(path, node)| (format!("{to}{}", &path[from.len()..]), node.clone()))
                    .collect();
                self.remove(to);
                moved
                    .into_iter()
                    .for_each(|(path, node)| self.set(&path, node));
                self.remove(from);
            }
            TraceStep::Link(..) => unreachable!("no trace has one"),
            TraceStep::Close(_) | TraceStep::Exit(_) | TraceStep::Kill => {}
        }
    }
}

/// Reads what is below a directory that does not change.
pub fn read_files(dir: &Path, below: &str, files: &mut Files) {
    find_files(dir, below, files).expect("read");
}

/// The same of one that may change meanwhile.
pub fn find_files(dir: &Path, below: &str, files: &mut Files) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().into_string().expect("text");
        // Firn's own.
        if below.is_empty() && name == ".firn" {
            continue;
        }
        let path = if below.is_empty() {
            name
        } else {
            format!("{below}/{name}")
        };
        let kind = entry.file_type()?;
        let node = if kind.is_dir() {
            find_files(&entry.path(), &path, files)?;
            Node::Dir
        } else if kind.is_symlink() {
            let target = fs::read_link(entry.path())?;
            Node::Link(target.to_string_lossy().into_owned())
        } else {
            Node::File(fs::read(entry.path())?)
        };
        files.insert(path, node);
    }
    Ok(())
}

/// Fails unless a directory has what is expected.
#[track_caller]
pub fn assert_files(told: &str, dir: &Path, expected: &Files) {
    let mut found = Files::new();
    read_files(dir, "", &mut found);
    let brief = |files: &Files| -> Vec<String> {
        let node = |node: &Node| match node {
            Node::File(bytes) => format!("{} bytes, {:?}", bytes.len(), bytes.first()),
            other => format!("{other:?}"),
        };
        files
            .iter()
            .map(|(path, one)| format!("{path}: {}", node(one)))
            .collect()
    };
    assert!(
        found == *expected,
        "{told}\nfound {:#?}\nexpected {:#?}",
        brief(&found),
        brief(expected)
    );
}
