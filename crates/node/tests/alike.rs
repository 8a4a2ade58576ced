//! Files that both hosts must have alike, compared by the real program on two simulated hosts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use hotspare_torture::Lab;
use hotspare_torture::lab::{Host, Process};
use hotspare_torture::protected::{Engine, HANG};

const DIR: &str = "/srv/hotspare-lab";

fn engine() -> Engine {
    Engine {
        binary: PathBuf::from(env!("CARGO_BIN_EXE_hotspare")),
        epoch: Duration::from_millis(50),
        service_cidr: None,
        replicated: Vec::new(),
        more: Vec::new(),
    }
}

fn put(host: &Host, name: &str, content: &[u8]) {
    let path = host.outside(format!("{DIR}/{name}"));
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn shell(script: &str) -> Vec<String> {
    ["sh", "-c", script].map(str::to_owned).to_vec()
}

fn says(process: &Process, what: &str) -> String {
    let found = process.stderr().find(HANG, |line| line.text.contains(what).then(|| line.clone()));
    let found = found.unwrap_or_else(|| panic!("no {what:?} in:\n{}", process.stderr().text()));
    found.text
}

fn is_protected(process: &Process) -> bool {
    process.stdout().text().contains("\"protected\"")
}

#[test]
fn a_program_that_differs_is_refused_with_its_path_and_is_protected_once_it_is_mended() {
    let lab = Lab::new(2).unwrap();
    let sleep = fs::read("/bin/sleep").unwrap();
    put(lab.host(0), "prog", &sleep);
    // Behind what the loader looks at, so it would run all the same.
    put(lab.host(1), "prog", &[&sleep[..], b"!"].concat());
    let engine = engine();
    let spare = engine.spare(lab.host(1)).unwrap();
    let command = [format!("{DIR}/prog"), "1000".to_owned()];
    let primary = engine.run(lab.host(0), &[lab.host(1)], &command).unwrap();
    let told = says(&primary, "files differ between the hosts");
    assert!(told.contains(&format!("{DIR}/prog")), "{told}");
    assert!(told.contains("install the same version on both hosts"), "{told}");
    says(&spare, &format!("{DIR}/prog"));
    assert!(primary.try_wait().is_none(), "the guest must go on");
    assert!(!is_protected(&primary));
    // The same content at another time is the same file.
    put(lab.host(1), "prog", &sleep);
    Engine::protected(&primary).unwrap();
}

#[test]
fn a_file_opened_later_is_compared_before_the_checkpoint_that_needs_it_counts() {
    let lab = Lab::new(2).unwrap();
    for host in lab.hosts() {
        put(host, "same", b"same");
        put(host, "late", host.name().as_bytes());
    }
    let engine = engine();
    let spare = engine.spare(lab.host(1)).unwrap();
    let script = format!(
        "cd {DIR}; exec 3<same; while [ ! -e go ]; do sleep 0.02; done; exec 4<late; \
         while [ ! -e end ]; do sleep 0.02; done; exit 9"
    );
    let primary = engine.run(lab.host(0), &[lab.host(1)], &shell(&script)).unwrap();
    Engine::protected(&primary).unwrap();
    put(lab.host(0), "go", b"");
    let told = says(&primary, "files differ between the hosts");
    assert!(told.contains(&format!("{DIR}/late")) && !told.contains("/same"), "{told}");
    let unprotected =
        |line: &hotspare_torture::lab::Line| line.text.contains("\"unprotected\"").then_some(());
    primary.stdout().find(HANG, unprotected).expect("protection ends loudly");
    assert!(spare.try_wait().is_none());
    put(lab.host(0), "end", b"");
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(9), "the guest goes on to its end");
}

#[test]
fn a_missing_file_and_other_permissions_are_told() {
    let lab = Lab::new(2).unwrap();
    for name in ["missing", "mode"] {
        put(lab.host(0), name, b"content");
    }
    put(lab.host(1), "mode", b"content");
    let mode = lab.host(1).outside(format!("{DIR}/mode"));
    fs::set_permissions(mode, fs::Permissions::from_mode(0o600)).unwrap();
    let engine = engine();
    let spare = engine.spare(lab.host(1)).unwrap();
    let script = format!("cd {DIR}; exec 3<missing 4<mode; while :; do sleep 0.02; done");
    let primary = engine.run(lab.host(0), &[lab.host(1)], &shell(&script)).unwrap();
    let told = says(&primary, "files differ between the hosts");
    assert!(told.contains(&format!("\"{DIR}/missing\": missing here")), "{told}");
    assert!(told.contains(&format!("\"{DIR}/mode\": mode 100600 here, 100755")), "{told}");
    assert!(primary.try_wait().is_none() && spare.try_wait().is_none());
    assert!(!is_protected(&primary));
}

#[test]
fn a_file_that_was_replaced_under_the_program_is_refused_on_the_primary() {
    let lab = Lab::new(2).unwrap();
    let sleep = fs::read("/bin/sleep").unwrap();
    for host in lab.hosts() {
        put(host, "prog", &sleep);
    }
    let engine = engine();
    let _spare = engine.spare(lab.host(1)).unwrap();
    let command = [format!("{DIR}/prog"), "1000".to_owned()];
    let primary = engine.run(lab.host(0), &[lab.host(1)], &command).unwrap();
    Engine::protected(&primary).unwrap();
    put(lab.host(0), "new", &sleep);
    let at = |name: &str| lab.host(0).outside(format!("{DIR}/{name}"));
    fs::rename(at("new"), at("prog")).unwrap();
    let told = says(&primary, "deleted or replaced");
    assert!(told.contains(&format!("{DIR}/prog")) && told.contains("restart"), "{told}");
    assert!(primary.try_wait().is_none());
}
