//! `--guarantee output-commit`: clients notice neither the death of a host nor a move.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hotspare_torture::chain::{
    Held, Scene, await_ready, protected_times, says, signal_redis, takeovers,
};
use hotspare_torture::clients::Connection;
use hotspare_torture::clock::Instant;
use hotspare_torture::etcd::Etcd;
use hotspare_torture::lab::{Line, Process, SERVICE_V4, SERVICE_V6};
use hotspare_torture::protected::{Engine, HANG, wait_for_service};
use nix::sys::signal::Signal;

const EPOCH: Duration = Duration::from_millis(100);
const PORT: u16 = 6379;
/// What clients notice is looked at here, not how long they wait.
const PATIENT: [&str; 2] = ["--silence", "500ms"];
/// How long nothing more may come.
const CALM: Duration = Duration::from_millis(700);

fn scene(hosts: usize, ipv6: bool) -> Scene {
    let mut scene = Scene::new(hosts, EPOCH);
    let words = ["--guarantee", "output-commit"].iter().chain(&PATIENT);
    scene.engine.more = words.map(|word| (*word).to_owned()).collect();
    if ipv6 {
        scene.engine.service_cidr = Some(format!("{SERVICE_V6}/64"));
    }
    scene
}

/// The address is the primary's host's, and moves.
fn direct(mut scene: Scene) -> Scene {
    scene.engine.more.extend(["--path".to_owned(), "direct".to_owned()]);
    scene
}

/// Waits until packets pass through a spare.
fn await_path(primary: &Process) {
    let told = |line: &Line| line.text.contains("through the spare").then_some(());
    assert!(primary.stderr().find(HANG, told).is_some(), "{}", primary.said());
}

fn death_of_the_primary(ipv6: bool, value_bytes: usize) {
    death_on(scene(2, ipv6), ipv6, value_bytes);
}

fn death_on(scene: Scene, ipv6: bool, value_bytes: usize) {
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let server =
        if ipv6 { (SERVICE_V6, PORT).into() } else { SocketAddr::from((SERVICE_V4, PORT)) };
    let primary = scene.run_at(server, &[1]);
    Engine::protected(&primary).unwrap();
    let load = Held::start(&scene, server, 6, value_bytes);
    load.goes_on("before", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    load.goes_on("after the death", &spare);
    load.noticed_nothing();
}

#[test]
fn no_client_notices_the_death_of_the_primary() {
    death_of_the_primary(false, 64);
}

#[test]
fn no_client_notices_the_death_of_the_primary_over_ipv6() {
    death_of_the_primary(true, 64);
}

/// Requests and replies of many segments: what was sent and not acknowledged is sent again.
#[test]
fn no_client_notices_the_death_of_the_primary_amid_large_values() {
    death_of_the_primary(false, 200_000);
}

#[test]
fn no_client_notices_the_death_of_the_primary_whose_address_moves() {
    death_on(direct(scene(2, false)), false, 64);
}

/// Says how often it has had a number.
const COUNTER: &str = r#"
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], int(sys.argv[2])))
seen = {}
while True:
    number, client = server.recvfrom(64)
    seen[number] = seen.get(number, 0) + 1
    server.sendto(b'%s %d' % (number, seen[number]), client)
"#;

/// What is sent until the server is there. Nobody counts these.
const PROBE: &[u8] = b"there?";

/// Sends numbers until it is told to end, and waits for the answers to all of them; gives the
/// answers.
fn count(server: SocketAddr, is_over: &AtomicBool, sent: &AtomicUsize) -> Vec<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect(server).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    let (mut answers, mut buffer) = (Vec::new(), [0; 64]);
    let deadline = Instant::now() + HANG;
    while socket.recv(&mut buffer).is_err() {
        assert!(Instant::now() < deadline, "the server does not answer");
        let _ = socket.send(PROBE);
    }
    let mut deadline = None;
    while deadline.is_none_or(|deadline| Instant::now() < deadline) {
        if !is_over.load(Ordering::Relaxed) {
            let number = sent.fetch_add(1, Ordering::Relaxed);
            socket.send(number.to_string().as_bytes()).unwrap();
        } else {
            // When all have come, one that comes twice would come now.
            let all = answers.len() >= sent.load(Ordering::Relaxed);
            let end = Instant::now() + if all { CALM } else { HANG };
            deadline = Some(deadline.map_or(end, |before: Instant| before.min(end)));
        }
        if let Ok(length) = socket.recv(&mut buffer)
            && !buffer.starts_with(PROBE)
        {
            answers.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
    }
    answers
}

/// Datagrams are sent once. Those that came to the spare while the primary died are handled by
/// the ghost, those that a checkpoint covers are not handled again, and all are answered.
#[test]
fn every_datagram_is_handled_once() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let words = ["python3", "-c", COUNTER, &SERVICE_V4.to_string(), &PORT.to_string()];
    let words = words.map(str::to_owned);
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    await_path(&primary);
    let (is_over, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let server = SocketAddr::from((SERVICE_V4, PORT));
    let (until, counted) = (Arc::clone(&is_over), Arc::clone(&sent));
    let client = scene.lab.client().thread(move || count(server, &until, &counted));
    reaches(&sent, 200);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    reaches(&sent, 200);
    is_over.store(true, Ordering::Relaxed);
    let mut answers = client.join().unwrap();
    let mut lost = Vec::new();
    for number in 0..sent.load(Ordering::Relaxed) {
        match answers.iter().position(|answer| *answer == format!("{number} 1")) {
            Some(found) => drop(answers.swap_remove(found)),
            None => lost.push(number),
        }
    }
    let odd: Vec<String> = answers;
    assert_eq!((lost, odd), (Vec::new(), Vec::new()), "{}", spare.said());
}

/// Connects anew for each request, until it is told to end.
fn call(server: SocketAddr, is_over: &AtomicBool, served: &AtomicUsize) {
    while !is_over.load(Ordering::Relaxed) {
        let mut connection = Connection::open(server, HANG, HANG).unwrap();
        connection.send(b"PING\r\n").unwrap();
        assert_eq!(connection.line().unwrap(), b"+PONG");
        served.fetch_add(1, Ordering::Relaxed);
    }
}

/// Ends each connection after one request.
const CLOSER: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=50)
while True:
    connection, _ = listener.accept()
    connection.recv(64)
    connection.sendall(b'+PONG\n')
    connection.close()
"#;

/// Connections that are in the middle of their handshake, or not accepted yet, when the host dies.
#[test]
fn no_client_that_is_just_connecting_notices_the_death_of_the_primary() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = scene.run(&[1]);
    death_amid_calls(&scene, &primary, &spare);
}

/// The server closes, and may have forgotten the connection when its last words leave.
#[test]
fn no_client_of_a_server_that_hangs_up_notices_the_death_of_the_primary() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let words = ["python3", "-c", CLOSER, &SERVICE_V4.to_string(), &PORT.to_string()];
    let words = words.map(str::to_owned);
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    wait_for_service(scene.lab.client(), (SERVICE_V4, PORT).into(), HANG).unwrap();
    death_amid_calls(&scene, &primary, &spare);
}

fn death_amid_calls(scene: &Scene, primary: &Process, spare: &Process) {
    await_path(primary);
    let (is_over, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let server = SocketAddr::from((SERVICE_V4, PORT));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (until, served) = (Arc::clone(&is_over), Arc::clone(&served));
            scene.lab.client().thread(move || call(server, &until, &served))
        })
        .collect();
    reaches(&served, 300);
    scene.host(0).kill().unwrap();
    Engine::taken_over(spare).unwrap();
    reaches(&served, 300);
    is_over.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.join().unwrap_or_else(|_| panic!("a client noticed\n{}", spare.said()));
    }
}

/// Waits until a count has grown by so much.
fn reaches(count: &AtomicUsize, more: usize) {
    let (from, deadline) = (count.load(Ordering::Relaxed), Instant::now() + HANG);
    while count.load(Ordering::Relaxed) < from + more {
        assert!(Instant::now() < deadline, "nothing goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn no_client_notices_a_switchover() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let server = (SERVICE_V4, PORT).into();
    let primary = scene.run(&[1]);
    Engine::protected(&primary).unwrap();
    let load = Held::start(&scene, server, 6, 64);
    load.goes_on("before", &primary);
    await_ready(&scene, &primary, 1);
    let said = scene.hotspare(0, &["switchover"]);
    assert!(said.is_ok(), "{said:?}\n{}\n{}", primary.said(), spare.said());
    load.goes_on("after the switchover", &spare);
    load.noticed_nothing();
}

/// While protection is paused nothing waits for anybody, and afterwards it counts again.
#[test]
fn no_client_notices_a_pause_of_the_protection() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = scene.run(&[1]);
    Engine::protected(&primary).unwrap();
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 6, 64);
    load.goes_on("before", &primary);
    let said = scene.hotspare(0, &["pause", "--reason", "a test"]);
    assert!(said.is_ok(), "{said:?}\n{}", primary.said());
    load.goes_on("paused", &primary);
    await_ready(&scene, &primary, 0);
    assert_eq!(takeovers(&spare), 0, "{}", spare.said());
    let said = scene.hotspare(0, &["resume"]);
    assert!(said.is_ok(), "{said:?}\n{}", primary.said());
    await_ready(&scene, &primary, 1);
    load.goes_on("resumed", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    load.goes_on("after the death", &spare);
    load.noticed_nothing();
}

/// The spare dies, the primary goes on alone; another spare joins, and then the primary dies.
#[test]
fn no_client_notices_the_death_of_the_spare() {
    let scene = scene(3, false);
    let first = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let server = (SERVICE_V4, PORT).into();
    let primary = scene.run(&[1, 2]);
    Engine::protected(&primary).unwrap();
    let load = Held::start(&scene, server, 6, 64);
    load.goes_on("before", &primary);
    await_ready(&scene, &primary, 1);
    scene.host(1).kill().unwrap();
    drop(first);
    load.goes_on("alone", &primary);
    await_ready(&scene, &primary, 0);
    let second = scene.engine.spare_with(scene.host(2), &PATIENT).unwrap();
    await_ready(&scene, &primary, 1);
    load.goes_on("protected again", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&second).unwrap();
    load.goes_on("after the death", &second);
    load.noticed_nothing();
}

/// Output waits for both spares: whichever takes over, and the other that follows it, has it all.
/// So much that the first copy takes its time.
fn fill() {
    let script = "for i = 1, 3000 do redis.call('SET', 'big' .. i, string.rep('x', 100000)) end";
    let mut connection = Connection::open((SERVICE_V4, PORT).into(), HANG, HANG).unwrap();
    let length = script.len();
    let words = format!("*3\r\n$4\r\nEVAL\r\n${length}\r\n{script}\r\n$1\r\n0\r\n");
    connection.send(words.as_bytes()).unwrap();
    assert_eq!(connection.line().unwrap(), b"$-1");
}

/// Until its ghost is complete the spare takes the primary for dead again and again, and cannot
/// replace it; the arbiter keeps it from doing so in the moment after.
#[test]
fn packets_pass_through_a_spare_that_doubted_the_primary() {
    let mut scene = scene(3, false);
    let etcd = Etcd::start(scene.host(2));
    let place = etcd.place();
    scene.engine.more.extend(["--arbiter".to_owned(), place.clone()]);
    let server = (SERVICE_V4, PORT).into();
    let primary = scene.run_at(server, &[1]);
    scene.lab.client().inside(fill);
    let words = ["--silence", "100ms", "--arbiter", &place];
    let spare = scene.engine.spare_with(scene.host(1), &words).unwrap();
    while !Engine::is_protected(&primary) {
        let said = || format!("primary: {}\nspare: {}", primary.said(), spare.said());
        assert!(!Engine::has_taken_over(&spare), "the lease was not over: {}", said());
        primary.signal(Signal::SIGSTOP).unwrap();
        std::thread::sleep(Duration::from_millis(130));
        primary.signal(Signal::SIGCONT).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(spare.said().contains("must not replace it"), "never doubted: {}", spare.said());
    await_path(&primary);
    let load = Held::start(&scene, server, 6, 64);
    load.goes_on("after the doubts", &primary);
    load.noticed_nothing();
}

#[test]
fn no_client_notices_two_deaths() {
    let scene = scene(3, false);
    let spares = [1, 2].map(|host| scene.engine.spare_with(scene.host(host), &PATIENT).unwrap());
    let primary = scene.run(&[1, 2]);
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 6, 64);
    await_ready(&scene, &primary, 2);
    load.goes_on("before", &primary);
    scene.host(0).kill().unwrap();
    let (first, second) = heir(&spares);
    load.goes_on("after the first death", first.1);
    protected_times(first.1, 1);
    load.goes_on("protected again", first.1);
    scene.host(first.0).kill().unwrap();
    Engine::taken_over(second).unwrap();
    load.goes_on("after the second death", second);
    load.noticed_nothing();
}

/// The spare that has taken over, with its host, and the other.
fn heir([one, two]: &[Process; 2]) -> ((usize, &Process), &Process) {
    let deadline = Instant::now() + HANG;
    loop {
        if takeovers(one) > 0 {
            return ((1, one), two);
        }
        if takeovers(two) > 0 {
            return ((2, two), one);
        }
        assert!(Instant::now() < deadline, "no heir:\n{}\n{}", one.said(), two.said());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Output waits for one of two spares; the primary, with a load, and the two: the one that is
/// waited for, with its host, and the other.
fn one_of_two(scene: &mut Scene) -> (Process, Held, (usize, Process), (usize, Process)) {
    scene.engine.more.extend(["--commit-on", "1"].map(str::to_owned));
    let first = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = scene.run(&[1, 2]);
    await_ready(scene, &primary, 1);
    let second = scene.engine.spare_with(scene.host(2), &PATIENT).unwrap();
    says(&second, "this spare stands by");
    let load = Held::start(scene, (SERVICE_V4, PORT).into(), 6, 64);
    load.goes_on("before", &primary);
    let deadline = Instant::now() + HANG;
    let stands_by =
        || Engine::status(scene.host(0), &scene.engine.binary, "standing_by") == Some(1);
    while !stands_by() {
        assert!(Instant::now() < deadline, "nobody stands by:\n{}", primary.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    await_ready(scene, &primary, 1);
    (primary, load, (1, first), (2, second))
}

#[test]
fn who_stands_by_counts_when_the_spare_that_was_waited_for_has_died() {
    let mut scene = scene(3, false);
    let (primary, load, (heir, first), (_, second)) = one_of_two(&mut scene);
    scene.host(heir).kill().unwrap();
    drop(first);
    says(&second, "output waits for this spare from now on");
    await_ready(&scene, &primary, 1);
    load.goes_on("with the next", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&second).unwrap();
    load.goes_on("after the death", &second);
    load.noticed_nothing();
}

/// It follows whoever takes over, and counts there.
#[test]
fn who_stands_by_follows_the_spare_that_was_waited_for() {
    let mut scene = scene(3, false);
    let (_primary, load, (heir, first), (_, second)) = one_of_two(&mut scene);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&first).unwrap();
    load.goes_on("after the first death", &first);
    protected_times(&first, 1);
    assert_eq!(takeovers(&second), 0);
    load.goes_on("protected again", &first);
    scene.host(heir).kill().unwrap();
    Engine::taken_over(&second).unwrap();
    load.goes_on("after the second death", &second);
    load.noticed_nothing();
}

#[test]
fn the_guest_moves_to_the_host_that_is_named() {
    let mut scene = scene(3, false);
    let (primary, load, _first, (by, second)) = one_of_two(&mut scene);
    let wrong = scene.hotspare(0, &["switchover", "--to", "192.0.2.7"]).unwrap_err();
    assert!(wrong.contains("no spare at 192.0.2.7"), "{wrong}");
    let to = scene.host(by).socket(0).ip().to_string();
    let said = scene.hotspare(0, &["switchover", "--to", &to]);
    assert!(said.is_ok(), "{said:?}\n{}\n{}", primary.said(), second.said());
    assert_eq!(takeovers(&second), 1, "{}", second.said());
    load.goes_on("after the switchover", &second);
    load.noticed_nothing();
}

/// What the killed program's sockets say to its clients is output like any other.
#[test]
fn no_client_notices_that_the_guest_is_killed() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = scene.run(&[1]);
    Engine::protected(&primary).unwrap();
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 6, 64);
    load.goes_on("before", &primary);
    await_ready(&scene, &primary, 1);
    signal_redis(&primary, Signal::SIGKILL);
    if let Err(error) = Engine::taken_over(&spare) {
        panic!("{error}\nprimary: {}", primary.said());
    }
    load.goes_on("after the kill", &spare);
    load.noticed_nothing();
}

/// Has a descriptor that cannot be moved from `break` to `mend`.
const BREAKABLE: &str = r#"
import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
connection, _ = listener.accept()
held = None
for line in connection.makefile('rb'):
    if line == b'break\n': held = os.open('/dev/ptmx', os.O_RDWR)
    if line == b'mend\n': os.close(held)
    connection.sendall(line)
"#;

/// A guest that cannot be protected at this time serves its clients, and is protected later.
#[test]
fn output_of_a_guest_that_cannot_be_protected_leaves() {
    let scene = scene(2, false);
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let words = ["python3", "-c", BREAKABLE, &SERVICE_V4.to_string(), &PORT.to_string()];
    let words = words.map(str::to_owned);
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    Engine::protected(&primary).unwrap();
    await_ready(&scene, &primary, 1);
    let server = SocketAddr::from((SERVICE_V4, PORT));
    // It takes one connection.
    let connect = move || Connection::open_when_it_listens(server, HANG).unwrap();
    let mut client = scene.lab.client().inside(connect);
    let mut ask = |text: &str| {
        client.send(format!("{text}\n").as_bytes()).unwrap();
        assert_eq!(client.line().unwrap(), text.as_bytes());
    };
    ask("one");
    ask("break");
    ask("two");
    let told = |line: &Line| line.text.contains("NOT PROTECTED").then_some(());
    assert!(primary.stderr().find(HANG, told).is_some(), "{}", primary.said());
    ask("mend");
    await_ready(&scene, &primary, 1);
    ask("three");
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    ask("four");
}

/// A guest without a spare waits for nobody.
#[test]
fn output_without_a_spare_leaves_at_once() {
    let scene = scene(1, false);
    let server = (SERVICE_V4, PORT).into();
    let primary = scene.run(&[]);
    let load = Held::start(&scene, server, 6, 64);
    load.goes_on("alone", &primary);
    load.noticed_nothing();
}
