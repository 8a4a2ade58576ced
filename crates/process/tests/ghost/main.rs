//! Round trips: a real program is captured, its ghost goes live, and the program never knows.
//!
//! This test has no harness: it executes itself as the guest's init, which must have one thread.

mod late;
mod scenes;
mod stored;
mod touch;
mod world;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Longest time for one scene. A thread lost in ptrace would otherwise wait for ever.
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "init") {
        let numbers: Vec<i32> =
            arguments[1..].iter().filter_map(|text| text.parse().ok()).collect();
        let Err(error) = hotspare_process::init::main(numbers[0], numbers[1]);
        eprintln!("init: {error}");
        return ExitCode::FAILURE;
    }
    if arguments.first().is_some_and(|first| first == "scene") {
        hotspare_kernel::news::block_child_signals().expect("blocks SIGCHLD");
        return scenes::run(&arguments[1]);
    }
    // By hand: `guest DIRECTORY NAME…` runs programs of guests/ that were built there.
    if arguments.first().is_some_and(|first| first == "guest") {
        let mut failed = 0;
        for name in &arguments[2..] {
            let passed = run_apart(&format!("{}/{name}", arguments[1]));
            println!("guest {name} ... {}", if passed { "ok" } else { "FAILED" });
            failed += u8::from(!passed);
        }
        return ExitCode::from(failed);
    }
    if arguments.first().is_some_and(|first| first == "bench") {
        hotspare_kernel::news::block_child_signals().expect("blocks SIGCHLD");
        touch::bench(&arguments[1..]);
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|text| !text.starts_with('-'));
    let (mut passed, mut failed) = (0, 0);
    for name in scenes::names() {
        if filter.is_some_and(|filter| !name.contains(filter.as_str())) {
            continue;
        }
        let is_good = run_apart(name);
        println!("test {name} ... {}", if is_good { "ok" } else { "FAILED" });
        *if is_good { &mut passed } else { &mut failed } += 1;
    }
    // As cargo's own, for whoever counts.
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {passed} passed; {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a scene in a process of its own, which takes all of the guest with it when it ends.
fn run_apart(name: &str) -> bool {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ghost-scene").args(["scene", name]);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => panic!("cannot start a scene: {error}"),
    };
    let pidfd = hotspare_kernel::pidfd::open(hotspare_kernel::HostPid(child.id() as i32));
    let pidfd = pidfd.expect("opens pidfd");
    let mut news =
        [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&pidfd), nix::poll::PollFlags::POLLIN)];
    let limit = nix::poll::PollTimeout::try_from(LIMIT).expect("fits");
    if nix::poll::poll(&mut news, limit) == Ok(0) {
        println!("{name}: not done after {LIMIT:?}");
        let _ = child.kill();
    }
    child.wait().is_ok_and(|status| status.success())
}
