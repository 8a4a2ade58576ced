//! The `hotspare` program: gives any Linux program a hot spare on a second host.
#![forbid(unsafe_code)]

mod agent;
mod alike;
mod arbiter;
mod beside;
mod brain;
mod cli;
mod control;
mod door;
mod epoch;
mod facts;
mod features;
#[cfg(test)]
mod fuzz;
mod history;
mod hooks;
mod join;
mod kept;
mod launch;
mod link;
mod look;
mod mailbox;
mod manual;
mod metrics;
mod outgoing;
mod output;
mod path;
mod patience;
mod paused;
mod preflight;
mod primary;
mod rehearsal;
mod report;
mod rhythm;
mod service;
mod settings;
mod spare;
mod stored;
mod switchover;
mod takeover;
mod touches;
mod trial;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // PID 1 of a guest: the same program under a hidden name, before anything else is set up.
    let words: Vec<String> = std::env::args().skip(1).take(3).collect();
    if let [command, socket, agent] = &words[..]
        && command == "init"
        && let (Ok(socket), Ok(agent)) = (socket.parse(), agent.parse())
    {
        let Err(error) = hotspare_process::init::main(socket, agent);
        // The end of the agent is the ordinary end.
        if !matches!(error, hotspare_process::init::InitError::Ended) {
            eprintln!("hotspare init: {error}");
        }
        return ExitCode::FAILURE;
    }
    if let [command, socket, agent] = &words[..]
        && command == "rehearsal"
        && let (Ok(socket), Ok(agent)) = (socket.parse(), agent.parse())
    {
        return match rehearsal::stage::main(socket, agent) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("hotspare rehearsal: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    if hotspare_net::BROKEN_GATE {
        eprintln!(
            "hotspare: THIS PROGRAM WAS BUILT BROKEN, with the feature broken-gate: replies leave \
             before the spare knows of them, and a failover takes them back. It is for tests of \
             tests; do not use it"
        );
    }
    say_panics_when_there_is_memory();
    let answer = hotspare_kernel::news::block_child_signals()
        .map_err(anyhow::Error::from)
        .and_then(|()| cli::Cli::try_parse().map_err(anyhow::Error::from))
        .and_then(cli::run);
    match answer {
        Ok(status) => ExitCode::from(status),
        Err(error) => match error.downcast_ref::<clap::Error>() {
            Some(usage) => {
                let _ = usage.print();
                ExitCode::from(usage_status(usage))
            }
            None => {
                let _ = writeln!(std::io::stderr(), "hotspare: {error:#}");
                ExitCode::from(FAILED)
            }
        },
    }
}

/// Where memory has run out, a pipe or a file takes no bytes: the last words are said again until
/// they are heard, or nobody may wait any more.
fn say_panics_when_there_is_memory() {
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(5);
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let words = format!(
            "hotspare: THIS IS A BUG: thread {}: {panic}\n{}",
            thread.name().unwrap_or("without a name"),
            std::backtrace::Backtrace::capture()
        );
        let began = std::time::Instant::now();
        while let Err(error) = std::io::stderr().write_all(words.as_bytes())
            && error.kind() == std::io::ErrorKind::OutOfMemory
            && began.elapsed() < PATIENCE
        {
            std::thread::sleep(PAUSE);
        }
    }));
}

/// Hotspare itself failed. Small numbers are the guest's.
const FAILED: u8 = 125;

/// Status of a command line that is wrong, or asks for help. For `check`, 2 means obstacles.
fn usage_status(usage: &clap::Error) -> u8 {
    match (usage.use_stderr(), std::env::args().nth(1).as_deref()) {
        (false, _) => 0,
        (true, Some("check")) => preflight::UNKNOWN,
        (true, _) => FAILED,
    }
}
