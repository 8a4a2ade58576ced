//! The simulated hosts keep what they promise.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use hotspare_torture::{Host, Lab};

const SOON: Duration = Duration::from_secs(20);

fn listen(host: &Host, address: SocketAddr) -> TcpListener {
    host.inside(move || TcpListener::bind(address).unwrap())
}

fn dial(host: &Host, address: SocketAddr, at_most: Duration) -> std::io::Result<TcpStream> {
    host.inside(move || TcpStream::connect_timeout(&address, at_most))
}

#[test]
fn hosts_reach_each_other_over_ipv4_and_ipv6() {
    let lab = Lab::new(2).unwrap();
    for address in [lab.host(0).socket(7000), (lab.host(0).v6(), 7000).into()] {
        let server = listen(lab.host(0), address);
        for from in [lab.host(1), lab.client()] {
            let mut client = dial(from, address, SOON).unwrap();
            let (mut served, _) = server.accept().unwrap();
            client.write_all(b"hello").unwrap();
            let mut said = [0; 5];
            served.read_exact(&mut said).unwrap();
            assert_eq!(&said, b"hello");
        }
    }
}

#[test]
fn the_same_path_holds_a_file_of_each_host() {
    let lab = Lab::new(2).unwrap();
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    };
    for host in lab.hosts() {
        let script = format!("echo {} > /srv/hotspare-lab/name", host.name());
        host.run(&mut shell(&script), SOON).unwrap();
    }
    for host in lab.hosts() {
        let read = host.run(&mut shell("cat /srv/hotspare-lab/name"), SOON).unwrap();
        assert_eq!(read.trim(), host.name());
        let outside = std::fs::read_to_string(host.outside("/srv/hotspare-lab/name")).unwrap();
        assert_eq!(outside.trim(), host.name());
    }
}

#[test]
fn a_killed_host_takes_every_descendant_with_it_and_says_nothing() {
    let lab = Lab::new(1).unwrap();
    let host = lab.host(0);
    let server = listen(host, host.socket(7001));
    let mut client = dial(lab.client(), host.socket(7001), SOON).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let (served, _) = server.accept().unwrap();

    let script = "unshare -pnmf --mount-proc sh -c 'setsid sleep 1000 & sleep 1000' & \
                  (setsid sleep 1000 &) ; echo started; wait";
    let process = host.spawn(Command::new("sh").args(["-c", script])).unwrap();
    process.stdout().find(SOON, |line| (line.text == "started").then_some(())).unwrap();
    host.kill().unwrap();
    assert!(!host.is_alive().unwrap());
    assert!(!process.wait(SOON).unwrap().success());

    drop(served);
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "no FIN and no RST came out");
}

#[test]
fn a_killed_host_can_be_booted_again() {
    let lab = Lab::new(1).unwrap();
    let host = lab.host(0);
    host.add_address("10.77.0.50/24").unwrap();
    std::fs::write(host.outside("/srv/hotspare-lab/kept"), "kept").unwrap();
    host.boot().unwrap();
    let said = host.run(Command::new("cat").arg("/srv/hotspare-lab/kept"), SOON).unwrap();
    assert_eq!(said, "kept\n");
    let addresses = host.run(Command::new("ip").args(["address", "show"]), SOON).unwrap();
    assert!(addresses.contains("10.77.0.1/24") && !addresses.contains("10.77.0.50"));
    let _server = listen(host, host.socket(7002));
    dial(lab.client(), host.socket(7002), SOON).unwrap();
}

#[test]
fn a_cut_drops_one_direction_and_heals() {
    let lab = Lab::new(2).unwrap();
    let address = lab.host(0).socket(7003);
    let server = listen(lab.host(0), address);
    let mut client = dial(lab.host(1), address, SOON).unwrap();
    let (mut served, _) = server.accept().unwrap();
    lab.cut(lab.host(0), lab.host(1)).unwrap();

    client.write_all(b"a").unwrap();
    served.read_exact(&mut [0]).unwrap();
    served.write_all(b"b").unwrap();
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let kind = client.read(&mut [0]).unwrap_err().kind();
    assert_eq!(kind, std::io::ErrorKind::WouldBlock);
    dial(lab.client(), address, SOON).expect("others are not cut off");

    lab.heal().unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client.read_exact(&mut [0]).unwrap();
}

#[test]
fn a_frozen_host_goes_on_when_thawed() {
    let lab = Lab::new(1).unwrap();
    let host = lab.host(0);
    let script = "while :; do echo tick; sleep 0.01; done";
    let process = host.spawn(Command::new("sh").args(["-c", script])).unwrap();
    process.stdout().find(SOON, |line| (line.text == "tick").then_some(())).unwrap();
    host.freeze().unwrap();
    let before = process.stdout().lines().len();
    host.thaw().unwrap();
    let mut seen = 0;
    process.stdout().find(SOON, |_| {
        seen += 1;
        (seen > before + 5).then_some(())
    });
    assert!(seen > before + 5);
}

#[test]
fn nothing_of_a_lab_is_left_when_it_is_dropped() {
    let lab = Lab::new(2).unwrap();
    let process = lab.host(1).spawn(Command::new("sleep").arg("1000")).unwrap();
    let (dir, pid) = (lab.dir().to_owned(), process.pid());
    drop(lab);
    assert!(!dir.exists());
    assert!(!process.wait(SOON).unwrap().success());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
