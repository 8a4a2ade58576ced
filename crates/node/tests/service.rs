//! As a service of systemd.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use hotspare_torture::protected::HANG;

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");

/// Ends a program when the test does.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a spare that tells `manager`; it wants a sign of life each 300 ms.
fn spare(manager: &str) -> Ended {
    let mut command = Command::new(BINARY);
    command.args(["spare", "--listen", "127.0.0.1:0"]).stderr(Stdio::null());
    command.env("NOTIFY_SOCKET", manager).env("WATCHDOG_USEC", "300000").env_remove("WATCHDOG_PID");
    command.env("HOTSPARE_STATE", env!("CARGO_TARGET_TMPDIR"));
    Ended(command.spawn().unwrap())
}

/// The next message to the manager.
fn told(manager: &UnixDatagram) -> Option<String> {
    let mut buffer = [0; 4096];
    let length = manager.recv(&mut buffer).ok()?;
    Some(String::from_utf8(buffer[..length].to_vec()).unwrap())
}

fn is_told_of_life(manager: &UnixDatagram, address: &str) -> Ended {
    manager.set_read_timeout(Some(HANG)).unwrap();
    let spare = spare(address);
    let first = told(manager).expect("a first message");
    assert_eq!(first, "READY=1\nSTATUS=spare, waiting for a primary");
    for _ in 0..3 {
        assert_eq!(told(manager).as_deref(), Some("WATCHDOG=1"));
    }
    spare
}

#[test]
fn the_manager_hears_that_the_agent_is_ready_and_lives() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    is_told_of_life(&manager, path.to_str().unwrap());
}

#[test]
fn the_manager_may_listen_at_an_abstract_address() {
    let name = format!("hotspare-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    is_told_of_life(&manager, &format!("@{name}"));
}

#[test]
fn the_units_are_what_systemd_understands() {
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let dir = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for (from, to) in [
        ("hotspare-spare.service", "hotspare-spare.service"),
        ("hotspare@.service", "hotspare@redis.service"),
    ] {
        let unit = std::fs::read_to_string(units.join(from)).unwrap();
        let installed = "/usr/local/bin/hotspare";
        assert!(unit.contains(&format!("ExecStart={installed} ")), "make install names it anew");
        // It must be there to be understood.
        std::fs::write(dir.path().join(to), unit.replace(installed, BINARY)).unwrap();
        paths.push(dir.path().join(to));
    }
    let verified =
        Command::new("systemd-analyze").args(["verify", "--man=no"]).args(&paths).output();
    let Ok(output) = verified else { return eprintln!("no systemd here: units not verified") };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("hotspare")).collect();
    assert!(ours.is_empty(), "{ours:#?}");
}
