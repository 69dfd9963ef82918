//! Tests of the order of the sources of options, and of the origin that each resolved option names.

use super::*;
use crate::minus_o::{Unknown, parse_minus_o};
use crate::table::row;

struct Fixture {
    _dir: tempfile::TempDir,
    sources: Sources,
}

/// Returns sources in which the first `count` of five set `io-threads`: the system file to 1, the user file to 2, the
/// environment to 3, `-o` to 4 and the flag to 5. With the flag there is no `-o`: different values of both are an
/// error.
fn fixture(count: usize) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let mut sources = Sources::default();
    let system = dir.path().join("system.toml");
    let user = dir.path().join("user.toml");
    if count >= 1 {
        std::fs::write(&system, "io-threads = 1\n").unwrap();
    }
    if count >= 2 {
        std::fs::write(&user, "# mine\nio-threads = 2\n").unwrap();
    }
    if count >= 3 {
        sources
            .surroundings
            .env
            .insert("FIRN_IO_THREADS".into(), "3".into());
    }
    if count == 4 {
        sources.minus_o = parse_minus_o("io-threads=4", Unknown::Refuse).unwrap();
    }
    if count >= 5 {
        sources.flags = vec![UncheckedOption {
            row: row("io-threads").unwrap(),
            text: "5".into(),
        }];
    }
    sources.surroundings.system_file = Some(system);
    sources.surroundings.user_file = Some(user);
    Fixture { _dir: dir, sources }
}

fn resolve_o(text: &str) -> Result<Resolved, ConfigError> {
    Sources {
        minus_o: parse_minus_o(text, Unknown::Refuse)?,
        ..Sources::default()
    }
    .resolve()
}

#[test]
fn each_source_wins_over_the_ones_below_it() {
    for count in 0..=5 {
        let fixture = fixture(count);
        let resolved = fixture.sources.resolve().unwrap();
        let expected = if count == 0 { 4 } else { count as u32 };
        assert_eq!(
            resolved.options.io_threads, expected,
            "the first {count} sources"
        );
        let (_, origin) = resolved
            .origins
            .iter()
            .find(|(row, _)| row.name == "io-threads")
            .unwrap();
        match count {
            0 => assert_eq!(*origin, Origin::Default),
            1 => assert!(origin.to_string().ends_with("system.toml")),
            2 => assert!(origin.to_string().ends_with("user.toml")),
            3 => assert_eq!(origin.to_string(), "FIRN_IO_THREADS"),
            4 => assert_eq!(*origin, Origin::MinusO),
            _ => assert_eq!(*origin, Origin::Flag),
        }
    }
}

#[test]
fn a_flag_and_minus_o_that_disagree_are_refused() {
    let mut fixture = fixture(5);
    fixture.sources.minus_o = parse_minus_o("io-threads=4", Unknown::Refuse).unwrap();
    let error = fixture.sources.resolve().unwrap_err();
    assert_eq!(
        error.to_string(),
        "io-threads is given twice, as `--io-threads 5` and as `-o io-threads=4`: give it once"
    );
}

#[test]
fn a_chunk_larger_than_the_arena_is_refused_with_both_origins() {
    assert_eq!(
        resolve_o("arena-size=1M").unwrap_err().to_string(),
        "chunk-size=4M (default) and arena-size=1M (-o) contradict each other: \
         the arena must hold at least one chunk: raise arena-size or lower chunk-size"
    );
}

#[test]
fn values_out_of_range_say_what_is_allowed() {
    for (text, expected) in [
        (
            "io-threads=0",
            "-o: io-threads: 0 is out of range: it may be 1 to 256",
        ),
        (
            "io-threads=many",
            "-o: io-threads: `many` is not a number from 1 to 256",
        ),
        (
            "chunk-size=32K",
            "-o: chunk-size: 32K is out of range: it may be 64K to 1G",
        ),
        (
            "chunk-size=3M",
            "-o: chunk-size: 3M is not a power of two: 4M would be",
        ),
        (
            "close=never",
            "-o: close: `never` is not `auto` or `drain` or `held`",
        ),
        (
            "drain-age=5",
            "-o: drain-age: `5` lacks a unit: write 5ms or 5s",
        ),
        (
            "arena-dir=shm",
            "-o: arena-dir: `shm` is not an absolute path: begin it with a slash",
        ),
        ("populate=maybe", "-o: populate: `maybe` is not yes or no"),
        (
            "fuse-threads=999",
            "-o: fuse-threads: 999 is out of range: it may be 0 to 256",
        ),
    ] {
        assert_eq!(resolve_o(text).unwrap_err().to_string(), expected);
    }
}

#[test]
fn a_bad_value_is_told_even_where_another_source_wins() {
    let mut fixture = fixture(5);
    fixture
        .sources
        .surroundings
        .env
        .insert("FIRN_IO_THREADS".into(), "x".into());
    let error = fixture.sources.resolve().unwrap_err().to_string();
    assert_eq!(
        error,
        "FIRN_IO_THREADS: io-threads: `x` is not a number from 1 to 256"
    );
}

#[test]
fn options_survive_the_pipe_to_firnd() {
    let options =
        resolve_o("ro,noexec,arena-size=1G,close=held,arena-dir=/mnt/huge,fuse-threads=auto")
            .unwrap()
            .options;
    let json = serde_json::to_string(&options).unwrap();
    assert_eq!(serde_json::from_str::<Options>(&json).unwrap(), options);
    let in_force = options.in_force();
    for expected in ["drain=eager", "close=held", "fsync=durable", "drain-age=5s"] {
        assert!(
            in_force.iter().any(|found| found == expected),
            "{expected} is not in {in_force:?}"
        );
    }
}

#[test]
fn of_kernel_flags_that_undo_each_other_the_last_counts() {
    assert_eq!(
        resolve_o("noexec,nodev,exec").unwrap().options.kernel_flags,
        [KernelFlag::NoDev, KernelFlag::Exec]
    );
}

#[test]
fn an_option_brings_along_what_it_needs() {
    for (given, other, value) in [
        ("history=3", "drain", "commit"),
        ("mode=shadow", "drain", "commit"),
        ("lanes=/srv0:/srv1", "placement", "dirs"),
        ("log-files=*.h5", "layout", "log"),
        ("token-endpoints=h:1", "tokens", "etcd"),
    ] {
        let resolved = resolve_o(given).unwrap();
        let mut rows = resolved.origins.iter();
        let (row, origin) = rows.find(|(row, _)| row.name == other).unwrap();
        assert_eq!((row.get)(&resolved.options), value, "{given}");
        let name = given.split('=').next().unwrap();
        assert_eq!(*origin, Origin::Implied(name));
    }
}

#[test]
fn a_default_brings_nothing_along_and_what_is_given_stays() {
    for given in ["history=off", "mode=buffer", "history=3,drain=commit"] {
        let resolved = resolve_o(given).unwrap();
        let implied = |origin: &Origin| matches!(origin, Origin::Implied(_));
        assert!(
            !resolved.origins.iter().any(|(_, origin)| implied(origin)),
            "{given}"
        );
    }
    assert_eq!(
        resolve_o("history=3,drain=eager").unwrap_err().to_string(),
        "history=3 (-o) and drain=eager (-o) contradict each other: \
         there are no commits without transactions: omit history, or use drain=commit"
    );
    assert_eq!(
        resolve_o("history=3,frontend=preload")
            .unwrap_err()
            .to_string(),
        "drain=commit (for history) and frontend=preload (-o) contradict each other: \
         a stub tree has no transactions: omit frontend, or use drain=demand"
    );
}
