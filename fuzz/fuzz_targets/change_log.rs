//! Change log of a transaction: any bytes are refused or read; what is read is written back with the same
//! meaning, and no name in it leads out of its directory.
#![no_main]

use firn_fuzz::Input;
use firn_transact::change_log::{BytesSource, ChangeLog, Entry, EntrySide, SEAL, StagedPath};
use firn_trust::is_component;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(log) = ChangeLog::decode(&input.bytes(&SEAL)) {
        must_be_path(&log.scope);
        if let Some(top) = &log.top {
            must_be_path(&top.path_after);
            assert_eq!(parent_of(&top.path_after), parent_of(&log.scope));
        }
        log.entries.iter().for_each(must_stay_inside);
        for object in &log.staged {
            must_be_name(object.at.dir.as_bytes());
            must_be_name(object.at.name.as_bytes());
            if let Some(content) = &object.content {
                must_be_name(content.file.as_bytes());
            }
        }
        assert_eq!(ChangeLog::decode(&log.encode()), Ok(log));
    }
});

fn must_stay_inside(entry: &Entry) {
    let names = entry
        .before
        .iter()
        .chain(&entry.after)
        .chain(&entry.unchanged_name);
    names.for_each(|entry_name| must_be_name(&entry_name.name));
    entry.path.iter().for_each(|(name, _)| must_be_name(name));
    for path in entry.portable.iter().flat_map(|known| &known.paths) {
        assert!(!path.is_empty(), "the path of an object");
        must_be_path(path);
    }
    for StagedPath { dir, name } in [&entry.new_at, &entry.kept_at, &entry.anchor_at]
        .into_iter()
        .flatten()
    {
        must_be_name(dir.as_bytes());
        must_be_name(name.as_bytes());
    }
    side_must_stay_inside(&entry.redo);
    side_must_stay_inside(&entry.undo);
}

fn side_must_stay_inside(side: &EntrySide) {
    side.names
        .iter()
        .flatten()
        .for_each(|(name, _)| must_be_name(name));
    let files = side.data.iter().flat_map(|data| &data.written);
    let files = files.filter_map(|range| match &range.source {
        BytesSource::File(at) => Some(at),
        BytesSource::Copy | BytesSource::Inline(_) => None,
    });
    for StagedPath { dir, name } in files.chain(&side.copy_at) {
        must_be_name(dir.as_bytes());
        must_be_name(name.as_bytes());
    }
}

fn parent_of(path: &[u8]) -> &[u8] {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    &path[..slash.unwrap_or(0)]
}

fn must_be_name(name: &[u8]) {
    assert!(is_component(name), "{name:?}");
}

fn must_be_path(path: &[u8]) {
    assert!(
        path.is_empty() || path.split(|&byte| byte == b'/').all(is_component),
        "{path:?}"
    );
}
