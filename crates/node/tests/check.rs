//! `hotspare check`: every obstacle with its reason and a way out, and the exit status.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

const CLEAR: i32 = 0;
const UNKNOWN: i32 = 1;
const OBSTACLE: i32 = 2;

fn hotspare(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotspare"));
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// The programs of `guests/`, built once.
fn guests() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let build = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("guests");
        let mut make = Command::new("make");
        let names = refused().into_iter().map(|(name, _)| name).chain(["mem_private".into()]);
        make.arg("-C").arg(root().join("guests")).arg("-s");
        make.arg(format!("BUILD={}", build.display()));
        make.args(names.map(|name| format!("{}/{name}", build.display())));
        assert!(make.status().unwrap().success());
        build
    })
}

/// Name and reason of `guests/refused.toml`.
fn refused() -> Vec<(String, String)> {
    let list = fs::read_to_string(root().join("guests/refused.toml")).unwrap();
    let value = |line: &str, key: &str| {
        let value = line.strip_prefix(key)?.strip_prefix(" = ")?;
        Some(value.trim_matches('"').to_owned())
    };
    let names = list.lines().filter_map(|line| value(line, "name"));
    let reasons = list.lines().filter_map(|line| value(line, "reason"));
    let found: Vec<_> = names.zip(reasons).collect();
    assert!(found.len() >= 9, "{found:?}");
    found
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn this_kernel_has_each_feature_by_name() {
    let output = hotspare(&["check"]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(CLEAR), "{said}");
    for name in ["WP_ASYNC", "PAGEMAP_SCAN", "pidfd_getfd", "TCP_REPAIR", "time", "set_tid", "FUSE"]
    {
        assert!(said.lines().any(|line| line.starts_with('✓') && line.contains(name)), "{said}");
    }
}

#[test]
fn a_program_without_obstacles_is_clear_after_real_checkpoints() {
    let directory = scratch();
    let work = directory.path().to_str().unwrap();
    let program = guests().join("mem_private");
    let (rule, out) = (format!("replicate:{work}"), format!("{work}/out"));
    let program = program.to_str().unwrap();
    let output = hotspare(&["check", "--for", "1s", "--files", &rule, "--", program, &out]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(CLEAR), "{said}");
    assert!(said.contains("checkpoints taken") && !said.contains(" 0 checkpoints"), "{said}");
}

#[test]
fn every_refused_program_is_told_with_its_reason_and_a_way_out() {
    for (name, reason) in refused() {
        // Whoever traces gets EPERM under us; nothing is in the way.
        if name == "tracer" {
            continue;
        }
        let directory = scratch();
        let work = directory.path().to_str().unwrap();
        let (rule, out) = (format!("replicate:{work}"), format!("{work}/out"));
        let program = guests().join(&name);
        let program = program.to_str().unwrap();
        let output = hotspare(&["check", "--for", "600ms", "--files", &rule, "--", program, &out]);
        let said = said(&output);
        // What comes and goes delays protection; that is told, and is no obstacle.
        let passed = |line: &str| line.starts_with("! only for a while") && line.contains(&reason);
        if output.status.code() == Some(CLEAR) && said.lines().any(passed) {
            continue;
        }
        assert_eq!(output.status.code(), Some(OBSTACLE), "{name}: {said}");
        let told: Vec<&str> = said.lines().collect();
        let found = told.windows(2).any(|pair| {
            pair[0].starts_with('✗') && pair[0].contains(&reason) && pair[1].starts_with("  → ")
        });
        assert!(found, "{name} lacks {reason:?}: {said}");
    }
}

#[test]
fn running_programs_are_looked_at_without_being_disturbed() {
    guests();
    std::thread::scope(|scope| {
        for (name, reason) in refused() {
            scope.spawn(move || look_at(&name, &reason));
        }
    });
}

/// Looks at a running guest until what is refused of it has been told, then lets it end.
fn look_at(name: &str, reason: &str) {
    let directory = scratch();
    let out = directory.path().join("out");
    let mut program = Command::new(guests().join(name));
    program.arg(&out).env("GUEST_STEP_MS", "100").env("GUEST_STEPS", "100");
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let mut program = program.spawn().unwrap();
    let pid = program.id().to_string();
    let rule = format!("shared:{}", directory.path().display());
    let reason = if name == "packet_socket" { "PACKET" } else { reason };
    loop {
        let output = hotspare(&["check", "--pid", &pid, "--files", &rule]);
        if output.status.code() == Some(OBSTACLE) && said(&output).contains(reason) {
            break;
        }
        let ended = program.try_wait().unwrap();
        assert_eq!(ended, None, "{name} lacks {reason:?}: {}", said(&output));
    }
    assert!(program.wait().unwrap().success(), "{name} was disturbed");
    // Children that some leave behind.
    let group = nix::unistd::Pid::from_raw(program.id() as i32);
    let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
    assert!(fs::read_to_string(out).unwrap().ends_with("PASS\n"), "{name} was disturbed");
}

#[test]
fn what_cannot_be_found_out_is_an_error_of_its_own() {
    let cases: [(&[&str], &str); 3] = [
        (&["check", "--pid", "999999999"], "there is no process 999999999"),
        (&["check", "--", "/no/such/program"], "cannot start /no/such/program"),
        (&["check", "--", "/bin/false"], "ended before it could be looked at (exit status 1)"),
    ];
    for (arguments, text) in cases {
        let output = hotspare(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(UNKNOWN), "{said}");
        assert!(said.contains(text), "{said}");
    }
}
