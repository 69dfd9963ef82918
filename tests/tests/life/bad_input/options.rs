//! Options that are unknown, contradictory or out of range: exit 2, and the option is named.

use firn_tests::Sandbox;
use firn_tests::mount::mount_args;

#[track_caller]
fn usage_error(options: &str, names: &str) {
    let sandbox = Sandbox::new("options");
    let outcome = sandbox.run(mount_args(
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
        options,
    ));
    outcome.code(2).says("firn: ").says(names);
    assert!(sandbox.arenas().is_empty(), "refused, and an arena is left");
}

#[test]
fn unknown_options_and_values_are_named() {
    usage_error("no-such-option=1", "no-such-option");
    usage_error("close=sometimes", "close");
    usage_error("fsync=never", "fsync");
    usage_error("passthrough=maybe", "passthrough");
    usage_error("arena-size=large", "arena-size");
    usage_error("io-threads=many", "io-threads");
}

#[test]
fn values_out_of_range_are_named() {
    usage_error("io-threads=0", "io-threads");
    usage_error("chunk-size=1", "chunk-size");
    usage_error("chunk-size=3000000", "chunk-size");
    usage_error("arena-size=0", "arena-size");
    usage_error("arena-size=99999999999999999999999", "arena-size");
    usage_error("drain-age=-5s", "drain-age");
    usage_error("drain-age=5", "drain-age");
    usage_error("arena-size=512K", "arena-size");
}

#[test]
fn an_arena_too_small_for_its_chunks_is_refused() {
    usage_error("arena-size=1M,chunk-size=4M", "arena-size");
}

#[test]
fn a_flag_and_an_option_that_disagree_are_refused() {
    let sandbox = Sandbox::new("twice");
    let mut args = mount_args(&sandbox.join("backing"), &sandbox.join("mnt"), "close=held");
    args.push("--close=drain".into());
    sandbox.run(args).code(2).says("close");
    assert!(sandbox.arenas().is_empty(), "refused, and an arena is left");
}

#[test]
fn unknown_flags_verbs_and_missing_arguments_are_usage_errors() {
    let sandbox = Sandbox::new("flags");
    for args in [
        &["mount"][..],
        &["mount", "--no-such-flag"],
        &["frobnicate"],
        &["wait", "--until", "eternal", "/"],
    ] {
        let outcome = sandbox.run(args).code(2);
        assert!(outcome.stderr.contains("firn"), "{outcome}");
    }
}
