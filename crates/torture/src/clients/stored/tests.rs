//! The judge is judged: a server in memory that forgets what it is told to forget.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use super::*;
use crate::lab::lock;

type Table = Arc<Mutex<HashMap<String, String>>>;

/// A key-value server speaking the line protocol on its own thread.
fn serve() -> (SocketAddr, Table) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let table = Table::default();
    let shared = Arc::clone(&table);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let table = Arc::clone(&shared);
            std::thread::spawn(move || answer(&stream, &table));
        }
    });
    (address, table)
}

fn answer(mut stream: &std::net::TcpStream, table: &Table) {
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let said = match words[..] {
            ["SET", key, value] => {
                lock(table).insert(key.to_owned(), value.to_owned());
                "OK".to_owned()
            }
            ["GET", key] => match lock(table).get(key) {
                Some(value) => format!("VALUE {value}"),
                None => "NONE".to_owned(),
            },
            _ => "ERR".to_owned(),
        };
        if stream.write_all(format!("{said}\n").as_bytes()).is_err() {
            return;
        }
    }
}

fn connect(server: SocketAddr) -> Connection {
    let at_most = Duration::from_secs(10);
    Connection::open(server, at_most, at_most).unwrap()
}

fn lane(keys: usize) -> StoreLane {
    let plan = StorePlan { protocol: Protocol::Line, keys, value_bytes: 30, writes: 1.0, seed: 1 };
    plan.sessions(1).remove(0)
}

fn write(lane: &mut StoreLane, connection: &mut Connection, key: usize) -> Result<(), ClientError> {
    exchange(lane, connection, (key, true))
}

fn read(lane: &mut StoreLane, connection: &mut Connection, key: usize) -> Result<(), ClientError> {
    exchange(lane, connection, (key, false))
}

fn exchange(
    lane: &mut StoreLane,
    connection: &mut Connection,
    (key, writes): (usize, bool),
) -> Result<(), ClientError> {
    let mut request = Vec::new();
    lane.ask_for(key, writes, &mut request);
    connection.send(&request)?;
    lane.take(connection)
}

fn record(session: StoreLane) -> LaneRecord<StoreLane> {
    LaneRecord {
        session,
        replies: Vec::new(),
        reconnects: 0,
        refused: 0,
        wrongs: Vec::new(),
        closed: true,
    }
}

#[test]
fn writes_of_the_last_moments_may_be_missing_after_a_death() {
    let (server, table) = serve();
    let mut lane = lane(8);
    let mut connection = connect(server);
    lane.open(&mut connection).unwrap();
    (0..50).for_each(|key| write(&mut lane, &mut connection, key % 8).unwrap());
    let past = lock(&table).clone();
    (0..5).for_each(|key| write(&mut lane, &mut connection, key).unwrap());
    let death = Instant::now();
    *lock(&table) = past;

    lane.open(&mut connect(server)).unwrap();
    let verdict = verify(&[record(lane.clone())], Some(death));
    assert_eq!(verdict.wrongs, [""; 0]);
    assert_eq!((verdict.lost.len(), verdict.writes_acknowledged), (5, 55));
    assert!(verdict.oldest_loss_before(death).unwrap() > Duration::ZERO);

    let undisturbed = verify(&[record(lane)], None);
    assert_eq!(undisturbed.wrongs.len(), 1, "without a death no write may be missing");
}

/// A lane that has lost its last three writes, and all that the server ever held.
fn lane_after_a_loss() -> (StoreLane, SocketAddr, Table, HashMap<String, String>) {
    let (server, table) = serve();
    let mut lane = lane(8);
    let mut connection = connect(server);
    lane.open(&mut connection).unwrap();
    (0..4).for_each(|key| write(&mut lane, &mut connection, key).unwrap());
    let past = lock(&table).clone();
    (4..7).for_each(|key| write(&mut lane, &mut connection, key).unwrap());
    let lost = std::mem::replace(&mut *lock(&table), past);
    lane.open(&mut connect(server)).unwrap();
    (lane, server, table, lost)
}

#[test]
fn the_write_in_hand_at_the_death_may_come_late_and_no_other() {
    for (key, may_come) in [(4, true), (5, false)] {
        let (mut lane, server, table, lost) = lane_after_a_loss();
        let name = lane.key(key);
        lock(&table).insert(name.clone(), lost[&name].clone());
        assert_eq!(lane.close(&mut connect(server)).is_ok(), may_come);
        assert_eq!(lane.losses().count(), if may_come { 2 } else { 3 });
    }
}

#[test]
fn a_late_write_over_a_newer_one_is_wrong() {
    let (mut lane, server, table, lost) = lane_after_a_loss();
    let death = Instant::now();
    write(&mut lane, &mut connect(server), 4).unwrap();
    let name = lane.key(4);
    lock(&table).insert(name.clone(), lost[&name].clone());
    lane.close(&mut connect(server)).unwrap();
    let verdict = verify(&[record(lane)], Some(death));
    assert!(verdict.wrongs.iter().any(|wrong| wrong.contains("after the death")));
}

#[test]
fn a_later_write_without_an_earlier_one_is_wrong() {
    let (server, table) = serve();
    let mut lane = lane(4);
    let mut connection = connect(server);
    lane.open(&mut connection).unwrap();
    let past = lock(&table).clone();
    (0..4).for_each(|key| write(&mut lane, &mut connection, key).unwrap());
    let name = lane.key(1);
    let old = past[&name].clone();
    lock(&table).insert(name, old);
    let error = lane.open(&mut connect(server)).unwrap_err();
    assert!(matches!(error, ClientError::Wrong(_)), "{error}");
}

#[test]
fn a_value_that_was_never_written_is_wrong() {
    let (server, table) = serve();
    let mut lane = lane(4);
    lane.open(&mut connect(server)).unwrap();
    lane.close(&mut connect(server)).unwrap();
    lock(&table).insert(lane.key(2), lane.value(3, 0));
    assert!(lane.close(&mut connect(server)).is_err());
    lock(&table).insert(lane.key(2), lane.value(2, 9));
    assert!(lane.close(&mut connect(server)).is_err());
}

#[test]
fn the_past_on_a_living_connection_is_wrong() {
    let (server, table) = serve();
    let mut lane = lane(1);
    let mut connection = connect(server);
    lane.open(&mut connection).unwrap();
    let past = lock(&table).clone();
    write(&mut lane, &mut connection, 0).unwrap();
    *lock(&table) = past;
    assert!(read(&mut lane, &mut connection, 0).is_err());
}

#[test]
fn lanes_that_went_back_to_different_instants_are_wrong() {
    let (server, table) = serve();
    let plan =
        StorePlan { protocol: Protocol::Line, keys: 2, value_bytes: 30, writes: 1.0, seed: 1 };
    let mut lanes = plan.sessions(2);
    let mut connection = connect(server);
    lanes.iter_mut().for_each(|lane| lane.open(&mut connection).unwrap());
    let early = lock(&table).clone();
    write(&mut lanes[0], &mut connection, 0).unwrap();
    write(&mut lanes[1], &mut connection, 0).unwrap();
    let death = Instant::now();
    let forgotten = lanes[0].key(0);
    lock(&table).insert(forgotten.clone(), early[&forgotten].clone());
    lanes.iter_mut().for_each(|lane| lane.open(&mut connection).unwrap());
    let verdict = verify(&lanes.into_iter().map(record).collect::<Vec<_>>(), Some(death));
    assert_eq!(verdict.wrongs.len(), 1, "{:?}", verdict.wrongs);
}
