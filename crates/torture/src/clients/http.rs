//! HTTP/1.1 GET over a kept connection, the body compared.

use super::connection::{ClientError, Connection};
use super::lane::Session;

/// What the body of a good reply is.
#[derive(Clone, Debug)]
pub enum HttpBody {
    /// Exactly these bytes.
    Exactly(Vec<u8>),
    /// Contains this text.
    Contains(String),
}

/// A lane that gets one path again and again.
#[derive(Clone, Debug)]
pub struct HttpLane {
    path: String,
    body: HttpBody,
    /// Bodies compared and found good.
    pub good: u64,
}

impl HttpLane {
    /// A lane that expects `body` at `path`.
    pub fn new(path: &str, body: HttpBody) -> HttpLane {
        HttpLane { path: path.to_owned(), body, good: 0 }
    }
}

impl Session for HttpLane {
    fn ask(&mut self, request: &mut Vec<u8>) {
        request.extend_from_slice(get_of(&self.path).as_bytes());
    }

    fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        let body = take_body(connection, &self.path)?;
        let is_good = match &self.body {
            HttpBody::Exactly(expected) => body == *expected,
            HttpBody::Contains(text) => String::from_utf8_lossy(&body).contains(text),
        };
        if !is_good {
            let said = String::from_utf8_lossy(&body[..body.len().min(100)]).into_owned();
            return Err(ClientError::Wrong(format!("body of {}: {said:?}…", self.path)));
        }
        self.good += 1;
        Ok(())
    }

    fn close(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        self.open(connection)
    }
}

fn get_of(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: lab\r\nConnection: keep-alive\r\n\r\n")
}

fn take_body(connection: &mut Connection, path: &str) -> Result<Vec<u8>, ClientError> {
    let (status, body) = take_reply(connection)?;
    if status == 200 { Ok(body) } else { Err(ClientError::Wrong(format!("{path}: {status}"))) }
}

/// Takes a reply to any request: its status and its body, whose length it must tell.
pub(super) fn take_reply(connection: &mut Connection) -> Result<(u16, Vec<u8>), ClientError> {
    let first = String::from_utf8_lossy(connection.line()?).into_owned();
    let mut length = None;
    loop {
        let header = String::from_utf8_lossy(connection.line()?).to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(count) = header.strip_prefix("content-length:") {
            length = count.trim().parse::<usize>().ok();
        }
    }
    let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
    match (status, length) {
        (Some(status), Some(length)) => Ok((status, connection.bytes(length)?.to_vec())),
        _ => Err(ClientError::Wrong(format!("{first}: no status or no length"))),
    }
}
