//! What the preload library costs programs that have nothing to do with Firn.

use std::path::Path;
use std::process::Command;

use anyhow::ensure;

use crate::worker::{self, Call, Task};
use firn_bench::cpu;
use firn_bench::firn::Firn;
use firn_bench::options::Common;
use firn_bench::report::{Limit, Report, Sample, median};

const WITHOUT: &str = "without";
const WITH: &str = "with the library";
const CALLS: u64 = 2_000_000;
/// Processes that make them, one after the other. What else the machine does adds time and takes none away, and
/// where a process's code comes to lie makes 10 ns: the fastest counts.
const CALLERS: u64 = 10;
const STARTS: usize = 50;

/// Adds a case for each kind of call and one for the start of a process.
pub fn measure(common: &Common, firn: &Firn, report: &mut Report) -> anyhow::Result<()> {
    let library = firn.preload()?;
    let both = [(WITHOUT, None), (WITH, Some(library.as_path()))];
    let mut case = |name: &str, measure: &dyn Fn(Option<&Path>) -> anyhow::Result<Sample>| {
        let mut samples = [Vec::new(), Vec::new()];
        for _ in 0..common.repeats() {
            for ((_, library), samples) in both.iter().zip(&mut samples) {
                samples.push(measure(*library)?);
            }
        }
        let candidates = both
            .iter()
            .zip(samples)
            .map(|((name, _), samples)| ((*name).to_owned(), samples));
        report.add(name, candidates.collect());
        let case = report.cases.last().expect("just added");
        let metric = case.candidates[0].metrics[0].name;
        let more = case
            .median(WITH, metric)
            .zip(case.median(WITHOUT, metric))
            .map(|(with, without)| with - without);
        anyhow::Ok(more.into_iter().collect::<Vec<f64>>())
    };
    let mut more = case("write of 1 byte to /dev/null", &|library| {
        calls(Call::Write, common, library)
    })?;
    more.extend(case("read of 1 byte from /dev/null", &|library| {
        calls(Call::Read, common, library)
    })?);
    let start = case("fork, exec and exit of /bin/true", &|library| {
        starts(library)
    })?;
    report.judge(
        "calls on other descriptors: the library adds [ns]",
        Limit::Most(15.0),
        &more,
    );
    report.judge(
        "start of a process: the library adds [µs]",
        Limit::Most(1000.0),
        &start,
    );
    Ok(())
}

fn calls(call: Call, common: &Common, library: Option<&Path>) -> anyhow::Result<Sample> {
    let count = common.choose(CALLS, CALLS / 10) / CALLERS;
    let mut fastest = f64::MAX;
    for _ in 0..CALLERS {
        let outcomes = worker::run_with(library, &[Task::Calls { call, count }])?;
        fastest = fastest.min(worker::elapsed_s(&outcomes) * 1e9 / count as f64);
    }
    Ok(vec![("each", "ns", fastest)])
}

fn starts(library: Option<&Path>) -> anyhow::Result<Sample> {
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let mut command = Command::new("/bin/true");
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
        }
        let begin = cpu::now_ns();
        let status = command.status()?;
        times.push((cpu::now_ns() - begin) as f64 * 1e-3);
        ensure!(status.success(), "/bin/true failed");
    }
    Ok(vec![("start", "µs", median(&times))])
}
